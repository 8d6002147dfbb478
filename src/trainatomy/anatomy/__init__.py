"""What the operations of a step do: groups, FLOP, bytes, shapes.  Functions over ``results.operations``; no torch."""
