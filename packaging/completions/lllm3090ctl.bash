# bash completion of lllm3090ctl. Made from its commands by: make generated

# The names of a kind that begin with what was typed, in whatever case, or nothing where the daemon does not run.
_lllm3090ctl_names() {
  local name typed=${current//\\/} quote=''
  case $current in [\"\']*) quote=${current:0:1} typed=${current:1} ;; esac
  while IFS= read -r name; do
    [[ ${name,,} == "${typed,,}"* ]] || continue
    # In quotes that are open already, only what would end them is different.
    # shellcheck disable=SC2001 # what & means in a replacement depends on the release of bash
    case $quote in
      "'") name=${name//\'/\'\\\'\'} ;;
      '"') name=$(sed 's/[\\"$`]/\\&/g' <<<"$name") ;;
      *) printf -v name %q "$name" ;;
    esac
    COMPREPLY+=("$name")
  done < <("$program" --names "$1" ${socket:+"$socket"} 2>/dev/null)
}

_lllm3090ctl_files() {
  compopt -o filenames 2>/dev/null
  local file
  while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$current")
}

# A command line of its own, from the word of this number.
_lllm3090ctl_program() {
  local file
  if declare -F _command_offset >/dev/null; then
    _command_offset "$1"
  elif ((COMP_CWORD == $1)); then
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -c -- "$current")
  else
    _lllm3090ctl_files
  fi
}

_lllm3090ctl_words() {
  local word
  for word in $1; do [[ $word != "$current"* ]] || COMPREPLY+=("$word"); done
}

_LLLM3090CTL_VALUED='--backend --batch --cache-type --card --context --cpu-experts --ctx --draft --draft-tokens --drain --gpu --gpu-layers --key-file --least-context --lines --max-tokens --micro-batch --model --offload --parallel --projector --purpose --rope-scaling --runs --shell --since --slot-policy --socket --system --timeout --vram -n -s'

# What can stand behind a command: options, and commands below it or arguments.
_lllm3090ctl_at() {
  commands='' options='' passes_on='' places=()
  case $1 in
    '')
      options='--socket --timeout --version -h --help'
      commands='autoload autostart chat claude config doctor engine env events explain gpu history inspect key load logs models pin plan ps release requests reset resume run setup status unload unpin version'
      ;;
    autoload)
      options='--off --json -h --help'
      places=(models nothing)
      ;;
    autostart)
      options='--json -h --help'
      ;;
    chat)
      options='-s --system --max-tokens --thinking --no-thinking -v --verbose --no-load --key-file --json -h --help'
      places=(models nothing nothing)
      ;;
    claude)
      options='--model --anyway --no-load --key-file --json -h --help'
      places=(files)
      passes_on=yes
      ;;
    config)
      options='-h --help'
      commands='check edit get schema set show unset'
      ;;
    'config check')
      options='--json -h --help'
      places=(files nothing)
      ;;
    'config edit')
      options='--no-reload --json -h --help'
      ;;
    'config get')
      options='--json -h --help'
      places=('=models_dir =state_dir =runtime_dir =llama_dir =engines_dir =catalogue_file =engine_pin =aliases =extra_arguments =autoload =autoload_wait_s =card =desktop =driver_reserve_mib =desktop_reserve_mib =workspace_reserve_mib =cache_type =slot_policy =offload =drafting =draft_tokens =projector =image_max_tokens =compute_buffer_factor =micro_batch_tokens =batch_tokens =context_checkpoints =checkpoint_min_step_tokens =prompt_cache_mib =reasoning_efforts =reasoning_effort_fallback =reasoning_floor_tokens =load_timeout_s =load_cap_s =stop_timeout_s =drain_s =verify_after_load =release_timeout_s =pressure_policy =pressure_grace_s =queue_timeout_s =least_residency_s =least_idle_s =serve_smaller =restart_failed =restart_pause_s =hang_policy =hang_patience_s =device_memory_limit =suspend =history_days =history_mib =idle_ttl_s =idle_ttl_of =models =gateway =gateway_address =gateway_port =gateway_hosts =gateway_origins =gateway_default_model =gateway_models =gateway_reasoning =gateway_load =gateway_wait_s =gateway_starvation_s =gateway_keepalive_s =gateway_queue =gateway_body_mib =gateway_access_log =requests_days =requests_kept =notifications =stop_models_on_exit =log_level' nothing)
      ;;
    'config schema')
      options='--json -h --help'
      ;;
    'config set')
      options='--no-reload --json -h --help'
      places=('=models_dir =state_dir =runtime_dir =llama_dir =engines_dir =catalogue_file =engine_pin =aliases =extra_arguments =autoload =autoload_wait_s =card =desktop =driver_reserve_mib =desktop_reserve_mib =workspace_reserve_mib =cache_type =slot_policy =offload =drafting =draft_tokens =projector =image_max_tokens =compute_buffer_factor =micro_batch_tokens =batch_tokens =context_checkpoints =checkpoint_min_step_tokens =prompt_cache_mib =reasoning_efforts =reasoning_effort_fallback =reasoning_floor_tokens =load_timeout_s =load_cap_s =stop_timeout_s =drain_s =verify_after_load =release_timeout_s =pressure_policy =pressure_grace_s =queue_timeout_s =least_residency_s =least_idle_s =serve_smaller =restart_failed =restart_pause_s =hang_policy =hang_patience_s =device_memory_limit =suspend =history_days =history_mib =idle_ttl_s =idle_ttl_of =models =gateway =gateway_address =gateway_port =gateway_hosts =gateway_origins =gateway_default_model =gateway_models =gateway_reasoning =gateway_load =gateway_wait_s =gateway_starvation_s =gateway_keepalive_s =gateway_queue =gateway_body_mib =gateway_access_log =requests_days =requests_kept =notifications =stop_models_on_exit =log_level' nothing)
      ;;
    'config show')
      options='--changed --json -h --help'
      places=('=models_dir =state_dir =runtime_dir =llama_dir =engines_dir =catalogue_file =engine_pin =aliases =extra_arguments =autoload =autoload_wait_s =card =desktop =driver_reserve_mib =desktop_reserve_mib =workspace_reserve_mib =cache_type =slot_policy =offload =drafting =draft_tokens =projector =image_max_tokens =compute_buffer_factor =micro_batch_tokens =batch_tokens =context_checkpoints =checkpoint_min_step_tokens =prompt_cache_mib =reasoning_efforts =reasoning_effort_fallback =reasoning_floor_tokens =load_timeout_s =load_cap_s =stop_timeout_s =drain_s =verify_after_load =release_timeout_s =pressure_policy =pressure_grace_s =queue_timeout_s =least_residency_s =least_idle_s =serve_smaller =restart_failed =restart_pause_s =hang_policy =hang_patience_s =device_memory_limit =suspend =history_days =history_mib =idle_ttl_s =idle_ttl_of =models =gateway =gateway_address =gateway_port =gateway_hosts =gateway_origins =gateway_default_model =gateway_models =gateway_reasoning =gateway_load =gateway_wait_s =gateway_starvation_s =gateway_keepalive_s =gateway_queue =gateway_body_mib =gateway_access_log =requests_days =requests_kept =notifications =stop_models_on_exit =log_level' nothing)
      ;;
    'config unset')
      options='--no-reload --json -h --help'
      places=('=models_dir =state_dir =runtime_dir =llama_dir =engines_dir =catalogue_file =engine_pin =aliases =extra_arguments =autoload =autoload_wait_s =card =desktop =driver_reserve_mib =desktop_reserve_mib =workspace_reserve_mib =cache_type =slot_policy =offload =drafting =draft_tokens =projector =image_max_tokens =compute_buffer_factor =micro_batch_tokens =batch_tokens =context_checkpoints =checkpoint_min_step_tokens =prompt_cache_mib =reasoning_efforts =reasoning_effort_fallback =reasoning_floor_tokens =load_timeout_s =load_cap_s =stop_timeout_s =drain_s =verify_after_load =release_timeout_s =pressure_policy =pressure_grace_s =queue_timeout_s =least_residency_s =least_idle_s =serve_smaller =restart_failed =restart_pause_s =hang_policy =hang_patience_s =device_memory_limit =suspend =history_days =history_mib =idle_ttl_s =idle_ttl_of =models =gateway =gateway_address =gateway_port =gateway_hosts =gateway_origins =gateway_default_model =gateway_models =gateway_reasoning =gateway_load =gateway_wait_s =gateway_starvation_s =gateway_keepalive_s =gateway_queue =gateway_body_mib =gateway_access_log =requests_days =requests_kept =notifications =stop_models_on_exit =log_level' nothing)
      ;;
    doctor)
      options='--json -h --help'
      ;;
    engine)
      options='-h --help'
      commands='list select show'
      ;;
    'engine list')
      options='--json -h --help'
      ;;
    'engine select')
      options='--automatic --json -h --help'
      places=(engines nothing)
      ;;
    'engine show')
      options='--json -h --help'
      places=(engines nothing)
      ;;
    env)
      options='--shell --key-file --json -h --help'
      places=(models nothing)
      ;;
    events)
      options='--since -f --follow -n --lines --json -h --help'
      ;;
    explain)
      options='--json -h --help'
      places=(instances nothing)
      ;;
    gpu)
      options='--json -h --help'
      ;;
    history)
      options='-n --runs --json -h --help'
      places=(models nothing)
      ;;
    inspect)
      options='--json -h --help'
      places=('models files' nothing)
      ;;
    key)
      options='-h --help'
      commands='add list remove'
      ;;
    'key add')
      options='--json -h --help'
      places=(nothing nothing)
      ;;
    'key list')
      options='--json -h --help'
      ;;
    'key remove')
      options='--json -h --help'
      places=(keys nothing)
      ;;
    load)
      options='--context --ctx --parallel --cache-type --slot-policy --offload --gpu-layers --cpu-experts --cache-on-host --draft --draft-tokens --projector --purpose --unified --swa-full --batch --micro-batch --rope-scaling --tier --least-context --gpu --pin --evict --no-evict --wait --no-wait --cancel-on-interrupt -q --quiet --json -h --help'
      places=(models 'dashed files')
      ;;
    logs)
      options='-f --follow -n --lines --since --json -h --help'
      places=(models nothing)
      ;;
    models)
      options='--catalogue --json -h --help'
      ;;
    pin)
      options='--json -h --help'
      places=(instances nothing)
      ;;
    plan)
      options='--context --ctx --parallel --cache-type --slot-policy --offload --gpu-layers --cpu-experts --cache-on-host --draft --draft-tokens --projector --purpose --unified --swa-full --batch --micro-batch --rope-scaling --tier --card --vram --desktop --headless --backend --check --explain --json -h --help'
      places=(models 'dashed files')
      ;;
    ps)
      options='--json -h --help'
      ;;
    release)
      options='--until-resume --json -h --help'
      ;;
    requests)
      options='--since -f --follow -n --lines --json -h --help'
      places=(models nothing)
      ;;
    reset)
      options='--json -h --help'
      places=(instances nothing)
      ;;
    resume)
      options='--json -h --help'
      ;;
    run)
      options='--no-load --key-file --json -h --help'
      places=(models 'dashed program')
      ;;
    setup)
      options='--dry-run --remove --no-enable --take-over --json -h --help'
      ;;
    status)
      options='--json -h --help'
      ;;
    unload)
      options='--drain --force --json -h --help'
      places=(instances nothing)
      ;;
    unpin)
      options='--json -h --help'
      places=(instances nothing)
      ;;
    version)
      options='--json -h --help'
      ;;
    *) return 1 ;;
  esac
}

# What an option takes.
_lllm3090ctl_value() {
  case "$1 $2" in
    ' --socket') _lllm3090ctl_files ;;
    'chat --key-file') _lllm3090ctl_files ;;
    'claude --model') _lllm3090ctl_names models ;;
    'claude --key-file') _lllm3090ctl_files ;;
    'env --shell') _lllm3090ctl_words 'sh fish csh json' ;;
    'env --key-file') _lllm3090ctl_files ;;
    'load --cache-type') _lllm3090ctl_words 'f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl' ;;
    'load --slot-policy') _lllm3090ctl_words 'balanced window' ;;
    'load --offload') _lllm3090ctl_words 'resident allowed' ;;
    'load --draft') _lllm3090ctl_words 'auto on off' ;;
    'load --projector') _lllm3090ctl_words 'auto card host off' ;;
    'load --purpose') _lllm3090ctl_words 'chat embedding rerank' ;;
    'load --rope-scaling') _lllm3090ctl_words 'none linear yarn' ;;
    'plan --cache-type') _lllm3090ctl_words 'f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl' ;;
    'plan --slot-policy') _lllm3090ctl_words 'balanced window' ;;
    'plan --offload') _lllm3090ctl_words 'resident allowed' ;;
    'plan --draft') _lllm3090ctl_words 'auto on off' ;;
    'plan --projector') _lllm3090ctl_words 'auto card host off' ;;
    'plan --purpose') _lllm3090ctl_words 'chat embedding rerank' ;;
    'plan --rope-scaling') _lllm3090ctl_words 'none linear yarn' ;;
    'plan --backend') _lllm3090ctl_words 'vulkan cuda cpu' ;;
    'run --key-file') _lllm3090ctl_files ;;
  esac
}
_lllm3090ctl() {
  local program=${1/#\~/$HOME} socket='' current previous='' path='' commands='' options='' passes_on='' places=()
  local words=() rest=$COMP_LINE before word index position=0 dashes=0 program_at=0 value=0 prefix=''
  COMPREPLY=()
  # What readline splits at = and : is put together again.
  for ((index = 0; index <= COMP_CWORD; index++)); do
    word=${COMP_WORDS[index]}
    before=
    if [[ -n $word ]]; then
      before=${rest%%"$word"*}
    elif [[ $rest == [[:blank:]]* ]]; then
      before=${rest:0:1}
    fi
    rest=${rest#"$before$word"}
    if ((index == 0)) || [[ -n $before ]]; then words+=("$word"); else words[${#words[@]} - 1]+=$word; fi
    # Of a command line of its own, the first word.
    if ((dashes && !program_at)); then program_at=$index; fi
    [[ $word != -- ]] || dashes=1
  done
  current=${words[${#words[@]} - 1]}
  dashes=0
  _lllm3090ctl_at ''
  for ((index = 1; index < ${#words[@]} - 1; index++)); do
    word=${words[index]}
    if ((value)); then
      value=0
      [[ $previous != --socket ]] || socket=$word
    elif ((dashes)); then
      ((position++))
    elif [[ $word == -- ]]; then
      dashes=1
    elif [[ $word == --socket=* ]]; then
      socket=${word#*=}
    elif [[ $word == -?* ]]; then
      previous=$word
      case " $_LLLM3090CTL_VALUED " in *" $word "*) value=1 ;; esac
    elif [[ -n $commands ]]; then
      path+=${path:+ }$word
      _lllm3090ctl_at "$path" || return 0
    else
      ((position++))
      [[ -z $passes_on ]] || dashes=1
    fi
  done
  if ((value == 0 && dashes == 0)) && [[ $current == --*=* ]]; then
    previous=${current%%=*}
    current=${current#*=}
    value=1
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=$previous=
  fi
  # A tilde and variables are expanded by the shell only when the command runs.
  socket=${socket/#\~/$HOME}
  if ((value)); then
    _lllm3090ctl_value "$path" "$previous"
  elif ((dashes == 0)) && [[ $current == -* ]]; then
    _lllm3090ctl_words "$options"
  elif [[ -n $commands ]]; then
    _lllm3090ctl_words "$commands"
  elif ((${#places[@]})); then
    ((position < ${#places[@]})) || position=$((${#places[@]} - 1))
    for word in ${places[position]}; do
      case $word in
        files) _lllm3090ctl_files ;;
        dashed) ((dashes)) || break ;;
        program) _lllm3090ctl_program "$program_at" ;;
        nothing) ;;
        =*) _lllm3090ctl_words "${word#=}" ;;
        *) _lllm3090ctl_names "$word" ;;
      esac
    done
  fi
  # Only what stands behind the last : is replaced.
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    before=${current%"${current##*:}"}
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=${COMPREPLY[index]:${#before}}; done
  fi
  if [[ -n $prefix ]]; then
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=$prefix${COMPREPLY[index]}; done
  fi
}

complete -F _lllm3090ctl lllm3090ctl
