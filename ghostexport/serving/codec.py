"""Text to token ids and back, as the model's own tokenizer and chat template do it, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ghostexport.errors import RecipeError, RunFolderError, RuntimeUnavailableError

Message = Mapping[str, Any]

TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, GENERATION, CONFIG = "chat_template.jinja", "generation_config.json", "config.json"

#: Names under which a configuration says how many positions the model has.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class Codec:
    """A folder's tokenizer, chat template, end tokens and number of positions.

    Attributes:
        tokenizer: of the tokenizers library.
        ends: ids that end an answer: the generation configuration's, and the tokenizer's own.
        positions: as many as the model has; None when its configuration does not say.
        template: the chat template; None where the model has none.

    Raises:
        RunFolderError: the folder has no tokenizer that can be read without transformers.
        RuntimeUnavailableError: the tokenizers library is missing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise RuntimeUnavailableError(
                f"The tokenizers library is missing: {error}.", "pip install tokenizers"
            ) from None
        if not (folder / TOKENIZER).is_file():
            raise RunFolderError(
                f"{folder} has no {TOKENIZER}, so there is no text to speak of.",
                "Export the model from a source with a fast tokenizer; engines still take token ids in Python.",
            )
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises plain Exception
            raise RunFolderError(f"{folder / TOKENIZER} cannot be read: {error}", "Export the model again.") from error
        settings, config = _json(folder / TOKENIZER_SETTINGS), _json(folder / CONFIG)
        config = config.get("text_config") or config
        self.special = {k: _text(v) for k, v in settings.items() if k.endswith("_token") and _text(v) is not None}
        ends = _json(folder / GENERATION).get("eos_token_id", config.get("eos_token_id"))
        own = self.tokenizer.token_to_id(self.special.get("eos_token") or "")
        listed = ends if isinstance(ends, list) else [ends]
        self.ends = frozenset(int(end) for end in (*listed, own) if end is not None)
        self.positions = next((int(config[name]) for name in _POSITIONS if config.get(name)), None)
        self.template = _template(folder, settings)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text to be continued, with what the tokenizer puts around it (BOS)."""
        return list(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            RecipeError: the model has no chat template, or the template refuses the messages.
        """
        return list(self.tokenizer.encode(self.render(messages), add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, see :meth:`encode_chat`."""
        if self.template is None:
            raise RecipeError(
                "This model has no chat template: it was not trained to converse.",
                "Use `ghostexport generate` or /v1/completions, which continue a text.",
            )
        import jinja2

        try:
            compiled = _environment().from_string(self.template)
            return str(compiled.render(messages=list(messages), add_generation_prompt=True, **self.special))
        except jinja2.TemplateError as error:
            raise RecipeError(f"The chat template refuses these messages: {error}", "Check roles and order.") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(f"{path} is not valid JSON: {error}", "Export the model again.") from error
    return data if isinstance(data, dict) else {}


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _environment() -> Any:
    """Templates come with models: the sandbox keeps them from anything but text."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's words for training; here it is what stands inside."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
