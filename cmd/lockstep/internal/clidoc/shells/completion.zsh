#compdef lockstep
# zsh completion for lockstep. Use it in this shell with
#   source <(lockstep completion zsh)
# and in every one by writing it to a file _lockstep in a directory of $fpath.
_lockstep() {
	local kind word help files= commands=
	local -a candidates
	while IFS=$'\t' read -r kind word help; do
		case $kind in
		word) candidates+=("${word//:/\\:}:$help") ;;
		file) files=1 ;;
		command) commands=1 ;;
		esac
	done < <("${words[1]}" complete zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)
	(( ${#candidates} )) && _describe -V lockstep candidates
	[[ -n $commands ]] && _command_names -e
	if [[ -n $files ]]; then
		compset -P '--*='
		_files
	fi
}
if [[ ${funcstack[1]} = _lockstep ]]; then
	_lockstep "$@" # loaded from $fpath
else
	compdef _lockstep lockstep
fi
