"""A small byte-level BPE tokenizer, trained on fixed sentences, and chat templates as models ship them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
SENTENCES = ("the quick brown fox jumps over the lazy dog", "system user assistant", "You are helpful. Hello world!")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template."""

TRIMMING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def small_tokenizer_json() -> str:
    """The content of a `tokenizer.json`: 256 bytes, some merges, and MARKERS as added tokens (the last two not
    special, as in Qwen3)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS[:3]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS[3:]])
    return str(tokenizer.to_str())
