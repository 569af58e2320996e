"""Renders chat templates with jinja2, in the environment that Hugging Face's transformers uses."""

import json
import time
import warnings

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = 1735689600 + 12 * 3600  # the time that strftime_now() returns


class GenerationTag(jinja2.ext.Extension):
    """Implements the tag {% generation %}, which marks the assistant's text. It renders its body.
    """

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def make_environment():
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda f: time.strftime(f, time.localtime(NOW))
    return environment


class Reference:
    def __init__(self):
        # jinja2 compiles templates to Python code, which may cause syntax warnings.
        warnings.simplefilter("ignore", SyntaxWarning)
        self._environment = make_environment()
        self._compiled = {}

    def render(self, template, variables):
        """Returns (text, None), or (None, error message)."""
        try:
            if template not in self._compiled:
                self._compiled[template] = self._environment.from_string(template)
            return self._compiled[template].render(**variables), None
        except Exception as error:  # a template may fail in any way that Python code may
            return None, f"{type(error).__name__}: {error}"
