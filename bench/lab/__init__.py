"""The parts of bench.ab: what each idea of FlashAttention-2 is worth, measured."""
