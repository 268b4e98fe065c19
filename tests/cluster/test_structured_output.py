"""A short form of tests/structured-output: 40 schemas, the random model, and three of the conditions."""

import structured_output


def test_answers_follow_their_schemas_under_conditions(figure):
    said = []
    problems = structured_output.run(structured_output.options(["--short"]), say=said.append)
    for line in said:
        figure(f"structured output: {line}")
    assert not problems, "\n".join(problem[:500] for problem in problems)
