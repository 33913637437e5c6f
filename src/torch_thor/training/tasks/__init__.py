"""Tasks: a task is a network, its data, its loss and its metrics.

A new one is a new file, and a line here.
"""

# the place of the class by the name of the task; its module is imported when the task is used
TASKS = {
    "image-classification": "images.ImageClassification",
    "autoencoder": "autoencoder.Autoencoder",
    "char-lm": "char_lm.CharLM",
    "masked-lm": "masked_lm.MaskedLM",
}
