"""How several ranks share one network: replicas, FSDP2 or DeepSpeed ZeRO. The loops see an engine and a World alone."""
