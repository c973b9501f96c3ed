"""Speculative decoding: drafters guess the next tokens of running requests, one step of the model checks them all."""

# Drafters of this tree -> the module that registers each, imported when it is asked for.
PACKAGES = {"ngram": ".ngram", "suffix": ".suffix", "draft": ".draft_model", "exit": ".early_exit",
            "eagle": ".heads", "mtp": ".heads"}
