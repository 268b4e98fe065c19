use super::*;

#[test]
fn blocks_of_generation_become_scopes() {
    let source = "a{%- generation -%}x{%+ endgeneration %}{% generated %}{{ '{% generation %}' }}{# {% generation %} #}";
    let expected =
        "a{%- with -%}x{%+ endwith %}{% generated %}{{ '{% generation %}' }}{# {% generation %} #}";
    assert_eq!(rewrite(source), expected);
    let raw = "{% raw %}{% generation %} '%s' % x {% endraw %}{% generation %}";
    assert_eq!(rewrite(raw), "{% raw %}{% generation %} '%s' % x {% endraw %}{% with %}");
}

#[test]
fn formatted_texts_become_filters() {
    let cases = [
        ("{{ '%s' % x }}", "{{ '%s'|format(x) }}"),
        ("{{ 'a%%' % (x.y, \"b)\"|upper) ~ 'c' }}", "{{ 'a%%'|format(x.y, \"b)\"|upper) ~ 'c' }}"),
        ("{% set a = \"%d\" % -x[0]|length + 1 %}", "{% set a = \"%d\"|format(-x[0]|length) + 1 %}"),
        ("{{ '%s' % ('%s' % y,) }}", "{{ '%s'|format('%s'|format(y)) }}"),
        ("{{ '%(a)s' % {'a': {'b': 1}} }}", "{{ '%(a)s'|format(**{'a': {'b': 1}}) }}"),
        ("{{ '%s' % (x)|upper }}", "{{ '%s'|format((x)|upper) }}"),
        ("{% if 'a' %}b{% endif %}", "{% if 'a' %}b{% endif %}"),
        ("{{ 7 % 2 }} 50 % of 'x' % y", "{{ 7 % 2 }} 50 % of 'x' % y"),
        ("{{ 'it\\'s %s' % x", "{{ 'it\\'s %s'|format(x)"),
    ];
    for (source, expected) in cases {
        assert_eq!(rewrite(source), expected, "{source}");
    }
}

#[test]
fn brackets_that_do_not_close_are_left_to_the_parser() {
    for (source, expected) in [("{{ '%s' % (", "{{ '%s'|format(()"), ("{{ '%s' % (é", "{{ '%s'|format((é)")]
    {
        assert_eq!(rewrite(source), expected);
    }
    // The depth and the time are bounded.
    let source = format!("{{{{ {}", "''%(".repeat(200_000));
    assert!(rewrite(&source).len() > source.len());
}

#[test]
fn everything_else_is_unchanged() {
    for source in ["", "{", "{{", "{%", "{{ {'a': {'b': '}}'}} }}%", "{% raw %}", "{# x", "é{{ 'é' }}{%"] {
        assert_eq!(rewrite(source), source);
    }
}
