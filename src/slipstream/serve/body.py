"""`Body`: how the JSON objects of requests are read, which fields may be there, and what is said of a wrong one."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from slipstream.serve.published import Others
from slipstream.text.jsontext import json_text


class FieldError(ValueError):
    """What is wrong with one field of an object, raised by the validators of the object."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """Add to a JSON schema what `Body` accepts besides the fields of a model: null, and fields without effect."""
    fields = schema.setdefault("properties", {})
    for name in fields.keys() - set(schema.get("required", ())):
        forms = fields[name].get("anyOf", ())
        if "$ref" in fields[name] or (forms and {"type": "null"} not in forms) or not forms:
            fields[name] = {"anyOf": [fields[name], {"type": "null"}]}
    for name, values in model.others.items():
        if name in fields:
            continue  # served here, though not everywhere
        if values is None:
            fields[name] = {"description": "Accepted without effect."}
        elif values:
            fields[name] = {
                "enum": [*values, None],
                "description": "Accepted without effect; other values are refused.",
            }
        else:
            fields[name] = {"type": "null", "description": "Not served."}
    schema["additionalProperties"] = {"type": "null"}


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        fast = {"fail_fast": True} if schema.get("type") in ("list", "dict") else {}
        return {name: _failing_fast(part) for name, part in schema.items()} | fast
    return [_failing_fast(part) for part in schema] if isinstance(schema, list) else schema


class Body(BaseModel):
    """A JSON object of a request. Values of other types are errors: a number is neither true nor "1".

    Null is the same as no field. Of the fields that are not the model's own, those in `others` are accepted with values
    that change nothing, and their names are kept; all others are errors.
    """

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_describe)
    others: ClassVar[Others] = {}
    _ignored: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Return the schema of the model, whose lists and dicts are left at their first error: they may be long."""
        return _failing_fast(handler(source))

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        own, ignored, fields, kind = _names(cls), [], {}, cls.model_fields.get("type")
        if kind and (kinds := get_args(kind.annotation)) and data.get("type", kinds[0]) not in (None, *kinds):
            return handler({name: value for name, value in data.items() if name in own})  # the others are that kind's
        for name, value in data.items():
            if value is None:
                continue
            if name in own:
                fields[name] = value
            else:
                _check_other(name, value, cls)
                ignored.append(name)
        made = handler(fields)
        made._ignored = tuple(ignored)
        return made


class Addressed(Body):
    """A body for a model, which it may name."""

    model: str | None = Field(None, description="The model's name; without one, the model that is served.")


def ignored(body: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every field of a body that was accepted without effect; [] stands for the items of a list."""
    if isinstance(body, Body):
        yield from (f"{path}{name}" for name in body._ignored)
        for name, value in body:
            yield from ignored(value, f"{path}{type(body).model_fields[name].alias or name}.")
    elif isinstance(body, list) and body and isinstance(body[0], Body):
        for item in body:
            yield from ignored(item, f"{path[:-1]}[].")


@cache
def _names(model: type[Body]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _check_other(name: str, value: Any, model: type[Body]) -> None:
    shown = ascii(name[:64])[1:-1][:64]  # it comes from a client: long, or half of a character
    if name not in model.others:
        near = get_close_matches(shown, [*_names(model), *model.others], 1)
        hint = f"did you mean {near[0]}?" if near else "leave it out."
        raise FieldError(shown, f"no such field is known here: {hint}")
    values = model.others[name]
    if values is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
        return
    if values:
        allowed = " or ".join(map(json_text, values))
        raise FieldError(shown, f"this value would change the answer and is not served; possible is {allowed}.")
    raise FieldError(shown, "this field would change the answer and is not served: leave it out.")


def complaint(errors: Sequence[Any], body: Any) -> tuple[str, str | None]:
    """Return a sentence about the most telling error of a body that pydantic refused, and the path of its field.

    That is the deepest one: a value that fits no form of a union has an error for every form, and the form that was
    meant is the one that was followed furthest. Errors about one field are joined.
    """
    if errors[0]["type"] == "json_invalid":
        return f"the body is not valid JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}.", None
    paths = [_path(error, body) for error in errors]
    path = max(paths, key=lambda each: each.count(".") + each.count("["))
    said = dict.fromkeys(_said(error) for error, each in zip(errors, paths, strict=True) if each == path)
    sentence = "; or: ".join(said)
    return f"{path or 'the body'}: {sentence.rstrip('.')}{'' if sentence.endswith('?') else '.'}", path or None


def _path(error: Any, body: Any) -> str:
    """Return the place of an error as a person writes it, `messages[1].content`.
    pydantic's place has labels besides, for the forms of unions: what is no key of the body, or the object's type."""
    places = [part for part in error["loc"] if part != "body"]
    if (own := _own(error)) is not None:
        named = [own.field]
    elif error["type"].startswith("union_tag"):
        named = ["type"]  # which tells the kinds of all unions apart
    else:
        named = [str(places.pop())] if error["type"] == "missing" and places else []
    path, value = "", body
    for part, after in pairwise([*places, *(named or [""])]):
        if isinstance(part, int) and isinstance(value, list):
            path, value = f"{path}[{part}]", value[part] if part < len(value) else None
        elif isinstance(value, Mapping) and part in value and not (part == value.get("type") and after in value):
            path, value = f"{path}.{part}", value[part]
    return ".".join([path, *named]).removeprefix(".")


def _own(error: Any) -> FieldError | None:
    cause = error.get("ctx", {}).get("error")
    return cause if isinstance(cause, FieldError) else None


def _said(error: Any) -> str:
    if (own := _own(error)) is not None:
        return str(own)
    if error["type"].startswith("union_tag"):
        return "the kind is missing" if "tag" not in error["ctx"] else f"possible is {error['ctx']['expected_tags']}"
    if error["type"] in ("model_type", "model_attributes_type"):
        return "Input should be an object"  # pydantic would name the class
    return str(error["msg"])
