# Short names for the scripts: `just` lists them.

_list:
    @just --list

# Style, words and docs: seconds to minutes
check:
    cargo fmt --all --check
    tests/retired-words
    tests/check-docs
    cargo clippy -q --locked --workspace --all-targets -- -D warnings

# One crate, with what its tests need: just t router
t crate *flags:
    tests/crate {{ crate }} {{ flags }}

# All checks, as continuous integration runs them
test:
    tests/run

# A cluster of two workers with the shipped model
serve *flags:
    cargo run --release --bin conductor -- --workers 2 {{ flags }}

# A bench of the whole cluster: just bench long_prompt --device sim
bench name *flags:
    cargo bench --bench {{ name }} -- {{ flags }}

# The load generator against a running server
load *flags:
    cargo run --release -p tutti-bench -- {{ flags }}

# Faults on real clusters
chaos *flags:
    tests/chaos {{ flags }}

# Fuzzers, a minute per target
fuzz *flags:
    tests/fuzz {{ flags }}

# The scheduler's properties over four million steps
properties:
    tests/long-properties

# The API docs of all crates
doc:
    cargo doc --workspace --no-deps --open
