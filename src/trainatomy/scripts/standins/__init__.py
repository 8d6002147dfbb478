"""Stand-ins for what a machine without GPU, network and data lacks, one module for each kind."""
