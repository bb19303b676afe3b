"""Letter sort: `dbca>` asks for `abcd`. A model of 0.24 M parameters learns it on a laptop.

Three to six letters out of a to j, repeats allowed. A tutor that is right three times in ten
warms a model up, so that it can sort but seldom does: what is left is for the reward.
"""
