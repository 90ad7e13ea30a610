"""Models: found, built or loaded, taken apart into blocks and a head, saved again.

``hub`` fetches files, ``config`` reads what a model is, ``load`` and ``saved`` make and keep the module,
``tokenizers`` its tokenizer, ``structure`` says where its blocks and its head are, ``features`` fits the last layer
without gradients, ``convert`` turns pickled weights into safetensors.
"""
