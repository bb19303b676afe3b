"""Megatron: the model of a policy as a GPT of megatron-core, under the names of Hugging Face.

Name it in a recipe, `trainer.engine: astraflow.trainers.megatron.engine:MegatronEngine`.
"""
