"""Chat templates in the styles of public models, written from their documentation.

`[[` and `]]` stand for the generation marks that a template for training has: around what the
assistant writes, its end mark included.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

DEEPSEEK = {name: f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant")}
DEEPSEEK |= {
    "bos": "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "eos": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_EACH = "{% for m in messages %}"
_ASSISTANT = "{% if m.role == 'assistant' %}"
_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}"
)


def _prompt(text: str) -> str:
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


def _same_for_all(head: str, tail: str, *, content: str = "m.content", end: str = "") -> str:
    """A head, the content and a tail for every role."""
    said = "{{ " + content + " }}" + tail
    return f"{_EACH}{head}{_ASSISTANT}[[{said}]]{{% else %}}{said}{{% endif %}}{end}{{% endfor %}}"


@dataclass(frozen=True)
class Style:
    """A template, the special tokens that it needs, and how its family's tokenizer splits."""

    template: str
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    metaspace: bool = False
    system: bool = True
    ends: tuple[str, ...] = ()
    """Of its generation_config.json."""
    learnt: str = "{}"
    """What is learnt of an answer."""
    more: dict[str, Any] = field(default_factory=dict)


_IM = ("<|im_start|>", "<|im_end|>")
_IM_HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
_IM_PROMPT = _prompt("{{ '<|im_start|>assistant\n' }}")
_CHATML = _same_for_all(_IM_HEAD, "{{ '<|im_end|>' }}", end="{{ '\n' }}") + _IM_PROMPT
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}"
    "{% endif %}"
)
_QWEN_CALLS = (
    f"{_TOOLS}{_EACH}{{{{ '<|im_start|>' + m.role + '\n' }}}}{_ASSISTANT}[["
    "{{ m.content }}{% for call in m.tool_calls %}{{ '\n<tool_call>' }}"
    "{{ call.function | tojson }}{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}]]"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + _IM_PROMPT
)
# Thoughts before the last question are left out, and the last answer always has some.
_QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    f"{_EACH}{_IM_HEAD}{_ASSISTANT}[["
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + said }}"
    "{% else %}{{ said }}{% endif %}{{ '<|im_end|>' }}]]{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}" + _IM_PROMPT
)
_LLAMA3_HEAD = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
_LLAMA3 = (
    "{{ bos_token }}"
    + _same_for_all(_LLAMA3_HEAD, "{{ '<|eot_id|>' }}", content="m.content | trim")
    + _prompt("{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}")
)
_LLAMA2 = (
    f"{_SYSTEM_FIRST}{{% for m in rest %}}"
    "{% if loop.first and system %}{% set said = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + "
    "m.content %}{% else %}{% set said = m.content %}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}"
    "{% else %}[[{{ ' ' + said.strip() + ' ' + eos_token }}]]{% endif %}{% endfor %}"
)
# What the system says stands in the last question, so a shorter conversation is no beginning.
_MISTRAL = (
    f"{_SYSTEM_FIRST}{{{{ bos_token }}}}{{% for m in rest %}}{{% if m.role == 'user' %}}"
    "{{ '[INST] ' }}{% if system and (loop.last or loop.index == loop.length - 1) %}"
    "{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% else %}{{ ' ' }}[[{{ m.content | trim }}{{ eos_token }}]]{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    f"{_EACH}{{% if m.role == 'assistant' %}}{{{{ '<start_of_turn>model\n' }}}}"
    "[[{{ m.content | trim }}{{ '<end_of_turn>' }}]]{% else %}"
    "{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}" + _prompt("{{ '<start_of_turn>model\n' }}")
)
_PHI3 = (
    _same_for_all("{{ '<|' + m.role + '|>\n' }}", "{{ '<|end|>' }}", end="{{ '\n' }}")
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}" + _EACH + "{% if m.role == 'system' %}{{ m.content }}"
    f"{{% elif m.role == 'user' %}}{{{{ '{DEEPSEEK['User']}' + m.content }}}}"
    f"{{% else %}}{{{{ '{DEEPSEEK['Assistant']}' }}}}"
    "[[{{ m.content.split('</think>')[-1] }}{{ eos_token }}]]{% endif %}{% endfor %}"
)
_ZEPHYR = _same_for_all(
    "{{ '<|' + m.role + '|>\n' }}", "{{ eos_token }}", end="{{ '\n' }}"
) + _prompt("{{ '<|assistant|>\n' }}")
_VICUNA = (
    f"{_SYSTEM_FIRST}{{{{ system }}}}{{% for m in rest %}}{{% if m.role == 'user' %}}"
    "{{ ' USER: ' + m.content }}{% else %}{{ ' ASSISTANT:' }}[[{{ ' ' + m.content + eos_token }}]]"
    "{% endif %}{% endfor %}" + _prompt("{{ ' ASSISTANT:' }}")
)

STYLES: dict[str, Style] = {
    "chatml": Style(_CHATML, _IM, "<|im_end|>", learnt="{}<|im_end|>"),
    "smollm": Style(
        _DEFAULT_SYSTEM + _CHATML, _IM, "<|im_end|>", "<|im_start|>", learnt="{}<|im_end|>"
    ),
    "qwen2.5": Style(
        _QWEN_CALLS, (*_IM, "<|endoftext|>"), "<|im_end|>", learnt="{}<|im_end|>",
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen3": Style(_QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>", learnt="{}<|im_end|>"),
    "llama-3": Style(
        _LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>", "<|begin_of_text|>", adds_bos=True, learnt="{}<|eot_id|>",
    ),
    "llama-2": Style(
        _LLAMA2, ("<s>", "</s>"), "</s>", "<s>", adds_bos=True, metaspace=True,
        learnt=" {} </s>",
    ),
    "mistral": Style(
        _MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", adds_bos=True,
        metaspace=True, learnt=" {}</s>",
    ),
    "gemma": Style(
        _GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>",
        adds_bos=True, metaspace=True, system=False, learnt="{}<end_of_turn>",
    ),
    "phi-3": Style(
        _PHI3, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        "<|endoftext|>", "<s>", learnt="{}<|end|>",
    ),
    "deepseek": Style(
        _DEEPSEEK + _prompt(f"{{{{ '{DEEPSEEK['Assistant']}' }}}}"), tuple(DEEPSEEK.values()),
        DEEPSEEK["eos"], DEEPSEEK["bos"], adds_bos=True, learnt="{}" + DEEPSEEK["eos"],
    ),
    "deepseek-r1": Style(
        _DEEPSEEK + _prompt(f"{{{{ '{DEEPSEEK['Assistant']}<think>\n' }}}}"),
        tuple(DEEPSEEK.values()), DEEPSEEK["eos"], DEEPSEEK["bos"], adds_bos=True,
        learnt="{}" + DEEPSEEK["eos"],
    ),
    "zephyr": Style(
        _ZEPHYR, ("<s>", "</s>"), "</s>", "<s>", adds_bos=True, metaspace=True, learnt="{}</s>"
    ),
    "vicuna": Style(
        _VICUNA, ("<s>", "</s>"), "</s>", "<s>", adds_bos=True, metaspace=True, learnt=" {}</s>"
    ),
}  # fmt: skip
TEXTS = "What is the capital of France? Paris. And of Italy? Rome, of course! It is 12 + 7 = 19."


@cache
def trained(specials: tuple[str, ...], *, metaspace: bool) -> str:
    """A small BPE tokenizer with these tokens, as JSON."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    found = tokenizers.Tokenizer(models.BPE(unk_token="<unk>" if metaspace else None))
    if metaspace:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        found.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
    letters = sorted({*map(chr, range(32, 127)), "\n"})
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*(("<unk>",) if metaspace else ()), *specials],
        initial_alphabet=letters if metaspace else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator([TEXTS, "user assistant model system INST"] * 4, trainer)
    return str(found.to_str())


def saved(style: Style, folder: Path, *, template: str | None = None) -> Path:
    """The folder of a style's tokenizer; `template` instead of its own."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    found = tokenizers.Tokenizer.from_str(trained(style.specials, metaspace=style.metaspace))
    if style.adds_bos:
        found.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{style.bos} $A", special_tokens=[(style.bos, found.token_to_id(style.bos))]
        )
    bos = {} if style.bos is None or style.bos not in style.specials else {"bos_token": style.bos}
    whole = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=style.eos, **bos)
    whole.chat_template = plain(style.template) if template is None else template
    whole.save_pretrained(str(folder))
    if style.ends:
        ids = [found.token_to_id(end) for end in style.ends]
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    return folder


def plain(template: str) -> str:
    """A template as most are: without marks of what is generated."""
    return template.replace("[[", "").replace("]]", "")


def marked(template: str) -> str:
    """A template with them."""
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
