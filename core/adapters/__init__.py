"""Low-rank adapters: read in PEFT's form, kept on the device in slots, and applied to the rows that name them."""
