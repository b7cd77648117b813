# fish completion of lllm3090ctl. Made from its commands by: make generated

# The words of the command and the number of arguments behind them: "engine show" 0. Options are left out.
function __lllm3090ctl_where
    set -l skip 0
    set -l path
    set -l position 0
    set -l dashes 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if test $dashes = 1
            set position (math $position + 1)
        else if test "$word" = --
            set dashes 1
        else if string match -q -- '-?*' $word
            contains -- $word $__lllm3090ctl_valued; and set skip 1
        else if contains -- "$path" $__lllm3090ctl_groups
            set path (string join ' ' -- $path $word)
        else
            set position (math $position + 1)
            contains -- "$path" $__lllm3090ctl_passes_on; and set dashes 1
        end
    end
    echo "$path"
    echo $position
    echo $dashes
end

# Behind this command; with a number, where so many arguments stand behind it, or as many and more ("1+"); with a third
# word, behind a double dash.
function __lllm3090ctl_at
    set -l where (__lllm3090ctl_where)
    test "$where[1]" = "$argv[1]"; or return 1
    set -q argv[2]; or return 0
    if set -q argv[3]; and test $where[3] = 0
        return 1
    end
    if string match -q '*+' -- $argv[2]
        test $where[2] -ge (string trim -r -c + -- $argv[2])
    else
        test $where[2] = $argv[2]
    end
end

# An option can stand here.
function __lllm3090ctl_option_at
    set -l where (__lllm3090ctl_where)
    test "$where[1]" = "$argv[1]"; and test $where[3] = 0
end

# The names of a kind, or nothing where the daemon does not run.
function __lllm3090ctl_names
    set -l words (commandline -opc)
    set -l socket
    for index in (seq 2 (count $words))
        if string match -q -- '--socket=*' $words[$index]
            set socket (string replace -- '--socket=' '' $words[$index])
        else if test "$words[$index]" = --socket; and set -q words[(math $index + 1)]
            set socket $words[(math $index + 1)]
        end
    end
    $words[1] --names $argv[1] $socket 2>/dev/null
end

# The command line of its own behind the double dash.
function __lllm3090ctl_program
    set -l words (commandline -opc)
    set -l dashes (contains -i -- -- $words); or return
    if test $dashes = (count $words)
        __fish_complete_command
    else
        complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-1]) (commandline -ct))
    end
end

set -g __lllm3090ctl_valued --backend --batch --cache-type --card --context --cpu-experts --ctx --draft --draft-tokens --drain --gpu --gpu-layers --key-file --least-context --lines --max-tokens --micro-batch --model --offload --parallel --projector --purpose --rope-scaling --runs --shell --since --slot-policy --socket --system --timeout --vram -n -s
set -g __lllm3090ctl_groups '' 'config' 'engine' 'key'
set -g __lllm3090ctl_passes_on 'claude'

complete -c lllm3090ctl -f

complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a autoload -d 'Load a model at every login, or list those that are'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a autostart -d 'Start the daemon at a login, as the desktop\'s autostart entry does'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a chat -d 'Ask a model something, or talk to it'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a claude -d 'Run Claude Code with a model of this computer'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a config -d 'Show and change the settings of the daemon'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a doctor -d 'Look at this machine: is everything as the daemon needs it?'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a engine -d 'Show the llama-server builds here, and choose one'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a env -d 'Print the environment that other programs need to use a model'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a events -d 'Show what happened, and who caused it'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a explain -d 'Show what a loaded model was priced at, and what it takes'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a gpu -d 'Show who holds the memory of each card, and what is left'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a history -d 'Show the last launches of a model, and why each ended'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a inspect -d 'Show what a model or any GGUF file is, layer by layer'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a key -d 'Make, list and remove keys of the gateway'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a load -d 'Load a model and wait until it answers'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a logs -d 'Show what a model\'s engine wrote'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a models -d 'List the models on disk, and what each would get'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a pin -d 'Keep a loaded model from being unloaded to make room'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a plan -d 'Show what loading a model would take, without loading it'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a ps -d 'List the models that run, with the memory they hold'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a release -d 'Free the whole card at once, such as for a game'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a requests -d 'Show what clients asked models through the gateway, and how long it took'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a reset -d 'Start a model again that failed or stays down'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a resume -d 'Take loads again after release --until-resume'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a run -d 'Run a program with the environment that it needs to use a model'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a setup -d 'Set up the daemon of this installation for you: units, D-Bus, autostart, completions, manual pages'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a status -d 'Show the daemon, the card, the engine, and what runs'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a unload -d 'Stop a model and wait until its memory is free again'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a unpin -d 'Take the pin of a model away'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'\' 0' -a version -d 'Show the versions of this program and of the daemon'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'\'' -l socket -r -F -d 'The daemon\'s control socket'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'\'' -l timeout -x -d 'How long to wait for an answer'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'\'' -l version -d 'Show the version and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'autoload\'' -l off -d 'No longer load it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'autoload\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'autoload\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'autoload\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'autostart\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'autostart\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -s s -l system -x -d 'System prompt: how the model is to answer'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -l max-tokens -x -d 'Longest answer'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -l thinking -l no-thinking -d 'Whether what the model thinks is shown, on stderr'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -s v -l verbose -d 'Tell tokens and speed of each answer, on stderr'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -l no-load -d 'Fail where the model is not loaded, instead of loading it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -l key-file -r -F -d 'File with the gateway\'s key, where it asks for one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -l json -d 'Write one JSON document per line (NDJSON) instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'chat\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'chat\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -l model -x -a '(__lllm3090ctl_names models)' -d 'The model to use'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -l anyway -d 'Also with a window below the 40,960 tokens that an agent needs'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -l no-load -d 'Fail where the model is not loaded, instead of loading it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -l key-file -r -F -d 'File with the gateway\'s key, where it asks for one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'claude\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'claude\' 0+' -F

complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a check -d 'Check the file, or another one, by the daemon\'s own rules; nothing is changed'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a edit -d 'Edit the file with $VISUAL or $EDITOR'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a get -d 'Print the value that counts: a text as it is, all else as JSON'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a schema -d 'Print the JSON schema of the file, for editors that check and complete while you type'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a set -d 'Change a setting'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a show -d 'Show what counts, where it comes from, and from when a change of it would count'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config\' 0' -a unset -d 'Take a setting out of the file, so that its default counts'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config check\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config check\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config check\' 0' -F

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config edit\'' -l no-reload -d 'Write the file, but do not have the daemon read it again'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config edit\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config edit\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config get\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config get\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config get\' 0' -a 'models_dir state_dir runtime_dir llama_dir engines_dir catalogue_file engine_pin aliases extra_arguments autoload autoload_wait_s card desktop driver_reserve_mib desktop_reserve_mib workspace_reserve_mib cache_type slot_policy offload drafting draft_tokens projector image_max_tokens compute_buffer_factor micro_batch_tokens batch_tokens context_checkpoints checkpoint_min_step_tokens prompt_cache_mib reasoning_efforts reasoning_effort_fallback reasoning_floor_tokens load_timeout_s load_cap_s stop_timeout_s drain_s verify_after_load release_timeout_s pressure_policy pressure_grace_s queue_timeout_s least_residency_s least_idle_s serve_smaller restart_failed restart_pause_s hang_policy hang_patience_s device_memory_limit suspend history_days history_mib idle_ttl_s idle_ttl_of models gateway gateway_address gateway_port gateway_hosts gateway_origins gateway_default_model gateway_models gateway_reasoning gateway_load gateway_wait_s gateway_starvation_s gateway_keepalive_s gateway_queue gateway_body_mib gateway_access_log requests_days requests_kept notifications stop_models_on_exit log_level'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config schema\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config schema\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config set\'' -l no-reload -d 'Write the file, but do not have the daemon read it again'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config set\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config set\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config set\' 0' -a 'models_dir state_dir runtime_dir llama_dir engines_dir catalogue_file engine_pin aliases extra_arguments autoload autoload_wait_s card desktop driver_reserve_mib desktop_reserve_mib workspace_reserve_mib cache_type slot_policy offload drafting draft_tokens projector image_max_tokens compute_buffer_factor micro_batch_tokens batch_tokens context_checkpoints checkpoint_min_step_tokens prompt_cache_mib reasoning_efforts reasoning_effort_fallback reasoning_floor_tokens load_timeout_s load_cap_s stop_timeout_s drain_s verify_after_load release_timeout_s pressure_policy pressure_grace_s queue_timeout_s least_residency_s least_idle_s serve_smaller restart_failed restart_pause_s hang_policy hang_patience_s device_memory_limit suspend history_days history_mib idle_ttl_s idle_ttl_of models gateway gateway_address gateway_port gateway_hosts gateway_origins gateway_default_model gateway_models gateway_reasoning gateway_load gateway_wait_s gateway_starvation_s gateway_keepalive_s gateway_queue gateway_body_mib gateway_access_log requests_days requests_kept notifications stop_models_on_exit log_level'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config show\'' -l changed -d 'Only those that are not at their default'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config show\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config show\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config show\' 0' -a 'models_dir state_dir runtime_dir llama_dir engines_dir catalogue_file engine_pin aliases extra_arguments autoload autoload_wait_s card desktop driver_reserve_mib desktop_reserve_mib workspace_reserve_mib cache_type slot_policy offload drafting draft_tokens projector image_max_tokens compute_buffer_factor micro_batch_tokens batch_tokens context_checkpoints checkpoint_min_step_tokens prompt_cache_mib reasoning_efforts reasoning_effort_fallback reasoning_floor_tokens load_timeout_s load_cap_s stop_timeout_s drain_s verify_after_load release_timeout_s pressure_policy pressure_grace_s queue_timeout_s least_residency_s least_idle_s serve_smaller restart_failed restart_pause_s hang_policy hang_patience_s device_memory_limit suspend history_days history_mib idle_ttl_s idle_ttl_of models gateway gateway_address gateway_port gateway_hosts gateway_origins gateway_default_model gateway_models gateway_reasoning gateway_load gateway_wait_s gateway_starvation_s gateway_keepalive_s gateway_queue gateway_body_mib gateway_access_log requests_days requests_kept notifications stop_models_on_exit log_level'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config unset\'' -l no-reload -d 'Write the file, but do not have the daemon read it again'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config unset\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'config unset\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'config unset\' 0' -a 'models_dir state_dir runtime_dir llama_dir engines_dir catalogue_file engine_pin aliases extra_arguments autoload autoload_wait_s card desktop driver_reserve_mib desktop_reserve_mib workspace_reserve_mib cache_type slot_policy offload drafting draft_tokens projector image_max_tokens compute_buffer_factor micro_batch_tokens batch_tokens context_checkpoints checkpoint_min_step_tokens prompt_cache_mib reasoning_efforts reasoning_effort_fallback reasoning_floor_tokens load_timeout_s load_cap_s stop_timeout_s drain_s verify_after_load release_timeout_s pressure_policy pressure_grace_s queue_timeout_s least_residency_s least_idle_s serve_smaller restart_failed restart_pause_s hang_policy hang_patience_s device_memory_limit suspend history_days history_mib idle_ttl_s idle_ttl_of models gateway gateway_address gateway_port gateway_hosts gateway_origins gateway_default_model gateway_models gateway_reasoning gateway_load gateway_wait_s gateway_starvation_s gateway_keepalive_s gateway_queue gateway_body_mib gateway_access_log requests_days requests_kept notifications stop_models_on_exit log_level'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'doctor\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'doctor\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_at \'engine\' 0' -a list -d 'List the builds, best first'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'engine\' 0' -a select -d 'Choose the build that models are started with from now on'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'engine\' 0' -a show -d 'Show what a build is and what it can do'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine list\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine list\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine select\'' -l automatic -d 'Forget the choice: the best build by its place is used'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine select\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine select\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'engine select\' 0' -a '(__lllm3090ctl_names engines)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine show\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'engine show\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'engine show\' 0' -a '(__lllm3090ctl_names engines)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'env\'' -l shell -x -a 'sh fish csh json' -d 'For whom: sh is also bash and zsh, csh also tcsh; json is an object, null where a variable is unset'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'env\'' -l key-file -r -F -d 'File with the gateway\'s key, where it asks for one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'env\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'env\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'env\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'events\'' -l since -x -d 'Only events after this number, or from then on: a time (2026-11-30T11:42:07Z; without a zone the time here, such as \'2026-11-30 12:42\'), or how long ago (90s, 10m, 2h, 3d)'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'events\'' -s f -l follow -d 'Go on with new events until the daemon stops, or Ctrl-C'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'events\'' -s n -l lines -x -d 'How many of the last events to begin with'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'events\'' -l json -d 'Write one JSON document per line (NDJSON) instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'events\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'explain\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'explain\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'explain\' 0' -a '(__lllm3090ctl_names instances)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'gpu\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'gpu\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'history\'' -s n -l runs -x -d 'How many of the last launches to show'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'history\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'history\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'history\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'inspect\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'inspect\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'inspect\' 0' -a '(__lllm3090ctl_names models)'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'inspect\' 0' -F

complete -c lllm3090ctl -n '__lllm3090ctl_at \'key\' 0' -a add -d 'Make a key, and show it this once'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'key\' 0' -a list -d 'List the names of the keys, and when each was made'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'key\' 0' -a remove -d 'Let nobody in with a key any more'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key add\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key add\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key list\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key list\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key remove\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'key remove\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'key remove\' 0' -a '(__lllm3090ctl_names keys)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l context -l ctx -x -d 'Context of all slots together, in tokens'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l parallel -x -d 'Slots: conversations served at the same time'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l cache-type -x -a 'f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl' -d 'Type of K and V in the KV cache'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l slot-policy -x -a 'balanced window' -d 'How slots are chosen without --parallel: for much context in all, or for the longest window'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l offload -x -a 'resident allowed' -d 'Whether layers or experts may be left in host memory for a useful window'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l gpu-layers -x -d 'Exactly so many layers on the card, the output counting as one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l cpu-experts -x -d 'The experts of exactly the first N layers in host memory'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l cache-on-host -d 'The cache in host memory, the layers not'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l draft -x -a 'auto on off' -d 'Whether a model that can drafts for itself (multi-token prediction)'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l draft-tokens -x -d 'Longest draft'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l projector -x -a 'auto card host off' -d 'Where the projector of a model that sees or hears is; off for text alone'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l purpose -x -a 'chat embedding rerank' -d 'What it serves: text, vectors, or scores of texts'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l unified -d 'All slots share one pool of context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l swa-full -d 'Sliding layers keep the whole context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l batch -x -d 'Tokens accepted at once'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l micro-batch -x -d 'Tokens computed at once'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l rope-scaling -x -a 'none linear yarn' -d 'How positions are stretched for a --context beyond the trained one; without one they are not, and only yarn gives more than the trained context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l tier -d 'A part of the cache in pinned host memory, where the engine offers that'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l least-context -x -d 'What will do where --context does not fit; needs --context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l gpu -x -d 'The only card it may be on, of several: number, UUID or PCI address, as `lllm3090ctl gpu` shows them'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l pin -d 'Never unload it for another model'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l evict -l no-evict -d 'Whether idle models may be unloaded for it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l wait -l no-wait -d 'Whether it may wait for room, while models are busy or just loaded'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l cancel-on-interrupt -d 'Ctrl-C (or SIGTERM) aborts the load'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -s q -l quiet -d 'Write nothing unless it fails; with --json only the last line'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -l json -d 'Write one JSON document per line (NDJSON) instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'load\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'load\' 0' -a '(__lllm3090ctl_names models)'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'load\' 1+ dashed' -F

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'logs\'' -s f -l follow -d 'Go on with new lines until the model is unloaded, or Ctrl-C'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'logs\'' -s n -l lines -x -d 'How many of the last lines to begin with'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'logs\'' -l since -x -d 'Only lines from then on: a time (2026-11-30T11:42:07Z; without a zone the time here, such as \'2026-11-30 12:42\'), or how long ago (90s, 10m, 2h, 3d)'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'logs\'' -l json -d 'Write one JSON document per line (NDJSON) instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'logs\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'logs\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'models\'' -l catalogue -d 'Also models that are not on disk, and where they are to be had'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'models\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'models\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'pin\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'pin\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'pin\' 0' -a '(__lllm3090ctl_names instances)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l context -l ctx -x -d 'Context of all slots together, in tokens'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l parallel -x -d 'Slots: conversations served at the same time'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l cache-type -x -a 'f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl' -d 'Type of K and V in the KV cache'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l slot-policy -x -a 'balanced window' -d 'How slots are chosen without --parallel: for much context in all, or for the longest window'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l offload -x -a 'resident allowed' -d 'Whether layers or experts may be left in host memory for a useful window'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l gpu-layers -x -d 'Exactly so many layers on the card, the output counting as one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l cpu-experts -x -d 'The experts of exactly the first N layers in host memory'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l cache-on-host -d 'The cache in host memory, the layers not'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l draft -x -a 'auto on off' -d 'Whether a model that can drafts for itself (multi-token prediction)'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l draft-tokens -x -d 'Longest draft'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l projector -x -a 'auto card host off' -d 'Where the projector of a model that sees or hears is; off for text alone'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l purpose -x -a 'chat embedding rerank' -d 'What it serves: text, vectors, or scores of texts'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l unified -d 'All slots share one pool of context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l swa-full -d 'Sliding layers keep the whole context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l batch -x -d 'Tokens accepted at once'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l micro-batch -x -d 'Tokens computed at once'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l rope-scaling -x -a 'none linear yarn' -d 'How positions are stretched for a --context beyond the trained one; without one they are not, and only yarn gives more than the trained context'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l tier -d 'A part of the cache in pinned host memory, where the engine offers that'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l card -x -d 'Plan for this card instead, empty: such as rtx-4090'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l vram -x -d 'Plan for any card of this memory, empty: such as 12GiB'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l desktop -l headless -d 'Plan for an empty card with or without a desktop on it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l backend -x -a 'vulkan cuda cpu' -d 'Plan for an empty card and this kind of engine; cpu for host memory in place of a card'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l check -d 'Also ask the engine what it would take (a dry run), and compare'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l explain -d 'Show the formula and origin of each line, and what else could be had'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'plan\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'plan\' 0' -a '(__lllm3090ctl_names models)'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'plan\' 1+ dashed' -F

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'ps\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'ps\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'release\'' -l until-resume -d 'Also refuse every load until: lllm3090ctl resume'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'release\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'release\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'requests\'' -l since -x -d 'Only requests that ended from then on: a time (2026-11-30T11:42:07Z; without a zone the time here, such as \'2026-11-30 12:42\'), or how long ago (90s, 10m, 2h, 3d)'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'requests\'' -s f -l follow -d 'Go on with others as they end, until the daemon stops, or Ctrl-C'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'requests\'' -s n -l lines -x -d 'How many of the last requests to begin with'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'requests\'' -l json -d 'Write one JSON document per line (NDJSON) instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'requests\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'requests\' 0' -a '(__lllm3090ctl_names models)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'reset\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'reset\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'reset\' 0' -a '(__lllm3090ctl_names instances)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'resume\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'resume\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'run\'' -l no-load -d 'Fail where the model is not loaded, instead of loading it'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'run\'' -l key-file -r -F -d 'File with the gateway\'s key, where it asks for one'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'run\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'run\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'run\' 0' -a '(__lllm3090ctl_names models)'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'run\' 1+ dashed' -a '(__lllm3090ctl_program)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -l dry-run -d 'Say what would be done, and change nothing'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -l remove -d 'Take it all away again: the daemon and the models that run are stopped; models on disk, settings and what was learnt stay'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -l no-enable -d 'Write the files, but enable and start nothing'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -l take-over -d 'In place of another installation of lllm3090 that is set up'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'setup\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'status\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'status\'' -s h -l help -d 'Show this message and exit'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unload\'' -l drain -x -d 'How long requests in flight may take to end; 0 stops it at once'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unload\'' -l force -d 'Kill it at once (SIGKILL), whatever it does'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unload\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unload\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'unload\' 0' -a '(__lllm3090ctl_names instances)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unpin\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'unpin\'' -s h -l help -d 'Show this message and exit'
complete -c lllm3090ctl -n '__lllm3090ctl_at \'unpin\' 0' -a '(__lllm3090ctl_names instances)'

complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'version\'' -l json -d 'Write one JSON document instead of text'
complete -c lllm3090ctl -n '__lllm3090ctl_option_at \'version\'' -s h -l help -d 'Show this message and exit'
