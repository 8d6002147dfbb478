"""Environment variables by which `accelerate launch` configures a script: precision, compiling, FSDP, DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.scripts.command import Command

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def variables(command: Command) -> Mapping[str, str]:
    """Return the variables that a command's launcher sets for each process, as accelerate's own code computes them.

    torchrun's say a process's rank, which the simulated process does itself.

    Raises:
        MissingLibrary: accelerate or DeepSpeed is not installed.
        WorkloadError: accelerate refuses its options.
    """
    words = command.launcher
    if words[:1] != ("accelerate",):
        return {}
    import_library("accelerate", f"`{command.text}`", install="accelerate")
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    given: Any = parser.parse_args([*words[2:], "script.py"])
    if given.num_processes is None and given.config_file is None and command.launch is not None:
        given.num_processes = command.launch.gpus
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            given, defaults, says_precision = launch._validate_launch_command(given)
            if given.use_deepspeed and not given.cpu:
                from trainatomy.training.parallel.deepspeed import import_deepspeed

                import_deepspeed()  # for a GPU, before the simulated one appears
                fields = [*(defaults.deepspeed_config if defaults else ()), *["mixed_precision"] * says_precision]
                given.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as `launch_command` does
                found = launch.prepare_deepspeed_cmd_env(given)[1]
            elif (given.use_fsdp or given.multi_gpu) and not given.cpu:
                found = launch.prepare_multi_gpu_env(given)
            else:
                found = launch.prepare_simple_launcher_cmd_env(given)[1]
    except ValueError as error:
        raise WorkloadError(f"`{command.text}`: accelerate refuses this: {error}") from error
    return {name: value for name, value in found.items() if name.startswith(_PREFIXES)}
