"""One rank of a training on several GPUs: process group, collectives, sharded tensors."""
