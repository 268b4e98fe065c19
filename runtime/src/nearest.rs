//! The known names that a misspelt name is near to.

/// Least similarity (Jaro–Winkler, 0 to 1) of a name that is suggested.
const LEAST: f64 = 0.8;
/// Maximum number of suggestions.
const MOST: usize = 3;

/// Returns the known names that are near to `name`, the nearest first. `stem` returns the part of a name that is
/// compared.
pub fn nearest<'a>(
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
    stem: impl Fn(&str) -> &str,
) -> Vec<&'a str> {
    let similarity = |known: &str| strsim::jaro_winkler(stem(name), stem(known));
    let mut near: Vec<(f64, &str)> = known
        .into_iter()
        .map(|known| (similarity(known), known))
        .filter(|(near, _)| *near >= LEAST)
        .collect();
    near.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    near.into_iter().take(MOST).map(|(_, known)| known).collect()
}
