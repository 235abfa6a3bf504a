"""Text steered while it is written, by words or by a discriminator (PPLM, Dathathri et al. 2020)."""
