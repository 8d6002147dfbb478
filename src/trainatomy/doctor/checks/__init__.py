"""From facts to findings: each check is a function of a ``MachineState`` that yields findings."""
