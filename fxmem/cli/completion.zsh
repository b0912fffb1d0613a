#compdef fxmem
# Completion of fxmem for zsh, written by `fxmem completion zsh`.
_fxmem() {
  local models='@MODELS@'
  local values='' files='' before="${words[CURRENT-1]}"
  local -a verbs shown
  if (( CURRENT == 2 )); then
    verbs=(@VERBS@)
    _describe command verbs
    return
  fi
  case "$before" in (-*) ;; (*) before='' ;; esac
  case "${words[2]} $before" in
@CASES@
  esac
  shown=(${=values})
  if [[ ${words[CURRENT]} != -* ]]; then shown=(${shown:#-*}); fi
  compadd -a shown
  if [[ -n $files ]]; then _files; fi
}
compdef _fxmem fxmem
