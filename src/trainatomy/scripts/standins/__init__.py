"""What stands in for what a machine without GPU, network and data has not, one module for each kind."""
