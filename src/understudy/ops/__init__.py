"""Pure tensor functions: what the methods compute between the gate and the picture."""
