"""Many processes: each holds a replica of the base model, and one worker stands for all of them."""
