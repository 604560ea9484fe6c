"""Tokenizer of the demo model: specials, one id a byte, and spelled-out names for all other ids.

Any text encodes byte by byte.  An id above the bytes is written `<id>` and reads back as that id,
so what the model says keeps its ids when a chat sends it back as text: multi-turn prefixes match.
"""

from __future__ import annotations

from typing import Any

SPECIALS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 4.  `transformers` and SGLang take pad, bos and eos from here."""

FIRST_BYTE = len(SPECIALS)
FIRST_NAMED = FIRST_BYTE + 256
"""Ids from here on are named; below are specials and bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Last ids of a model that takes pictures."""

PICTURE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_names() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte value, 0 to 255.

    Printable Latin-1 stands for itself, the rest is moved above U+0100 in order: the mapping of
    `tokenizers.pre_tokenizers.ByteLevel`, which does not tell the order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    names, moved = [], 0
    for value in range(256):
        if value in printable:
            names.append(chr(value))
        else:
            names.append(chr(256 + moved))
            moved += 1
    return names


def build_tokenizer(vocab: int, context: int, marks: tuple[str, ...] = ()) -> Any:
    """A `transformers.PreTrainedTokenizerFast` of exactly `vocab` ids, the last of them `marks`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = range(FIRST_NAMED, vocab - len(marks))
    names = [*SPECIALS, *byte_names(), *(f"<{index}>" for index in named), *marks]
    # No merges: a piece of text is either a whole name or single bytes.
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"<\d+>|[\s\S]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = (*SPECIALS, *marks)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        additional_special_tokens=list(specials[3:]),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = PICTURE_TEMPLATE if marks else CHAT_TEMPLATE
    return fast
