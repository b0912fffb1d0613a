# Completion of fxmem for bash, written by `fxmem completion bash`.
_fxmem() {
  local models='@MODELS@'
  local line="${COMP_LINE:0:COMP_POINT}" values='' files='' word
  local -a words
  read -ra words <<< "$line"
  case "$line" in *[[:space:]]) words+=('') ;; esac
  local count=${#words[@]}
  local current="${words[count-1]}" before="${words[count-2]}" verb="${words[1]}"
  if [ "$count" -le 2 ]; then
    values='@VERBS@ --help --version'
  else
    case "$before" in -*) ;; *) before='' ;; esac
    case "$verb $before" in
@CASES@
    esac
  fi
  COMPREPLY=()
  local head=''
  case "$current" in *:*) head="${current%"${current##*:}"}" ;; esac
  for word in $(compgen -W "$values" -- "$current"); do
    case "$word" in -*) case "$current" in -*) ;; *) continue ;; esac ;; esac
    COMPREPLY+=("${word#"$head"}")
  done
  if [ -n "$files" ]; then
    while IFS= read -r word; do
      if [ -d "$word" ]; then word="$word/"; fi
      COMPREPLY+=("${word#"$head"}")
    done < <(compgen -f -- "$current")
  fi
  case "${COMPREPLY[0]}" in *:|*/) compopt -o nospace 2>/dev/null ;; esac
}
complete -F _fxmem fxmem
