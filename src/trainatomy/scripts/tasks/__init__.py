"""What a training does besides its steps, as the configuration of its framework says: one module for each framework."""
