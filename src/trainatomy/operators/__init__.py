"""Everything known about aten operators: what they allocate, what they cost, how they are launched."""
