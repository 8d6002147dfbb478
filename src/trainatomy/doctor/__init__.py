"""The machine around a training: facts, and what is wrong with them.

gathering.py   everything that can be found here, as one ``MachineState``
gpus.py        GPUs and their connections, through NVML
software.py    versions, environment variables
probe.py       what only a process with torch can say, and measured copies: runs in a process of its own
host.py        processors, memory, limits of the host
watching.py    a running training over some seconds
checks/        from facts to findings: pure functions
diagnosing.py  all checks of a machine

Facts are values of ``results.machine``, findings of ``results.diagnosis``; their wording is in ``reporters``.
Nothing here changes a setting.
"""
