"""What completions are worth: reward functions called for them, reward models, a teacher.

It may import rollouts/, rewards/, run/ and what lies below them.
"""
