"""Operations in plain PyTorch, for any device."""
