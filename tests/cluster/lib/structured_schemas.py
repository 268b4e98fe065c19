"""JSON schemas by families of keywords, drawn by a seed. Every schema is one that Tutti enforces.

Sizes are bounded, so that a model with random weights reaches the end of most documents.
"""

import string

WORDS = ("red", "green", "blue", "Ångström", "a b", 'quo"te', "back\\slash", "", "<|im_end|>", "{", "null", "日本")
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^a+b?$", "^\\d{2}:\\d{2}$", "^[^\\s]{1,5}$", "b{2}", "^\\w{3}$")


def name(rng):
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(1, 6)))


def scalar(rng):
    return rng.choice((scalar_type, number, text, enumeration, constant))(rng)


def scalar_type(rng):
    kinds = rng.sample(("null", "boolean", "integer"), rng.randint(1, 2))
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def number(rng):
    low = rng.randint(-200, 200)
    high = low + rng.randint(0, 300)
    match rng.randrange(5):
        case 0:
            return {"type": "integer", "minimum": low, "maximum": high}
        case 1:
            return {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        case 2:
            return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice((2, 5, 10))}
        case 3:
            return {"type": "number", "minimum": low / 4, "maximum": high / 4}
        case _:
            return {"type": "integer"}


def text(rng):
    match rng.randrange(3):
        case 0:
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}
        case 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
        case _:
            return {"type": "string", "maxLength": rng.randint(0, 10)}


def format_of_text(rng):
    return {"type": "string", "format": rng.choice(FORMATS)}


def enumeration(rng):
    values = rng.sample([*WORDS, 0, -7, 2.5, True, None], rng.randint(1, 5))
    if rng.random() < 0.3:
        values += [{"a": [1]}, [1, "x"]]
    return {"enum": values}


def constant(rng):
    return {"const": rng.choice((rng.choice(WORDS), 3, False, None, {"k": [1, {"n": None}]}))}


def array(rng, depth=0):
    most = rng.randint(1, 3)
    schema = {"type": "array", "items": nested(rng, depth), "maxItems": most}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, most)
    if rng.random() < 0.3:
        schema["prefixItems"] = [scalar(rng) for _ in range(rng.randint(1, 2))]
        schema["items"] = rng.choice((False, scalar(rng)))
        schema["maxItems"] = max(most, 2)
        schema.pop("minItems", None)
    return schema


def document(rng, depth=0):
    members = {name(rng): nested(rng, depth) for _ in range(rng.randint(0, 4))}
    schema = {"type": "object", "properties": members, "additionalProperties": False}
    schema["required"] = [key for key in members if rng.random() < 0.7]
    match rng.randrange(6):
        case 0:
            open_to = {"additionalProperties": scalar_type(rng)}
        case 1:
            open_to = {"patternProperties": {"^x_[a-z]{1,3}$": scalar_type(rng)}}
        case _:
            return schema
    # The number of members is enforced where all that are named are required.
    return schema | open_to | {"required": list(members), "maxProperties": len(members) + 1}


def strict_document(rng, depth=0):
    members = {name(rng): nested(rng, depth) for _ in range(rng.randint(1, 4))}
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def nested(rng, depth):
    if depth >= 2 or rng.random() < 0.6:
        return scalar(rng)
    return rng.choice((array, strict_document))(rng, depth + 1)


def union(rng):
    match rng.randrange(4):
        case 0:
            return {"anyOf": [scalar(rng), array(rng, 1)]}
        case 1:
            return {"anyOf": [strict_document(rng, 1), strict_document(rng, 1)]}
        case 2:
            return {"oneOf": [{"type": "null"}, {"type": "boolean"}, {"type": "string", "maxLength": 4}]}
        case _:
            low = rng.randint(0, 20)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(0, 9)}]}


def reference(rng):
    match rng.randrange(3):
        case 0:
            return {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 3, "$defs": {"one": scalar(rng)}}
        case 1:
            return {"$ref": "#/definitions/d", "definitions": {"d": strict_document(rng, 1)}}
        case _:
            tree = {"type": "object", "properties": {"v": scalar_type(rng), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}}
            tree |= {"required": ["v", "next"], "additionalProperties": False}
            return {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}


def annotated(rng):
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": rng.choice(WORDS)}
    return schema | strict_document(rng, 1) | {"examples": [1], "deprecated": False}


FAMILIES = {
    "types": scalar_type,
    "numbers": number,
    "texts": text,
    "formats": format_of_text,
    "enums": enumeration,
    "constants": constant,
    "arrays": array,
    "objects": document,
    "strict objects": strict_document,
    "unions": union,
    "references": reference,
    "annotations": annotated,
}


def draw(rng, count):
    """Returns (family, schema), the families in turn."""
    families = list(FAMILIES.items())
    return [(family, make(rng)) for family, make in (families[n % len(families)] for n in range(count))]
