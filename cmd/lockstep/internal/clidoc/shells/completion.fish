# fish completion for lockstep. Use it in this shell with
#   lockstep completion fish | source
# and in every one with
#   lockstep completion fish >~/.config/fish/completions/lockstep.fish
function __lockstep_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    $words[1] complete fish -- $words[2..-1] "$current" 2>/dev/null | while read -l -d \t kind word help
        switch $kind
            case word
                printf '%s\t%s\n' $word $help
            case file
                __fish_complete_path (string replace -r -- '^--[^=]*=' '' "$current")
            case command
                __fish_complete_command
        end
    end
end
complete -c lockstep -f -a '(__lockstep_complete)'
