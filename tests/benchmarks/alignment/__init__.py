"""Does it work? Gold reward and KL of SFT, DPO, offline PPO and the shipped default, at an equal budget of CPU seconds.

    python -m tests.benchmarks.alignment prepare|run|report [--results build/alignment] [--noise 0.1] [--seeds 1 2 3]

A *cell* is (share of flipped labels, seed): one data set, one SFT reference, one teacher and student, shared by every
*variant*. A variant is the product's own PPO stage under other config values, or TRL's DPO in an environment of its
own. The budget counts CPU seconds of the training process, which is the wall clock of one quiet core, since every
process runs one thread; loading, and measuring gold reward and KL on frozen prompts, is outside of it.
"""
