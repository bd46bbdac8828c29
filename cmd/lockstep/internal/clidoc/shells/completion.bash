# bash completion for lockstep. Use it in this shell with
#   source <(lockstep completion bash)
# and in every one with
#   lockstep completion bash >~/.local/share/bash-completion/completions/lockstep
_lockstep() {
	local cur=${COMP_WORDS[COMP_CWORD]} kind word help
	[ "$cur" = = ] && cur=
	COMPREPLY=()
	while IFS=$'\t' read -r kind word help; do
		case $kind in
		word) COMPREPLY+=("$word") ;;
		file)
			compopt -o filenames 2>/dev/null
			while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
			;;
		command)
			while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -c -- "$cur")
			;;
		esac
	done < <("${COMP_WORDS[0]}" complete bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _lockstep lockstep
