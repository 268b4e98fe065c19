//! Says which tensors of a checkpoint the model does not use.

/// Number of names that are listed.
const LISTED: usize = 8;

/// Parts of published checkpoints that a text model does not use: draft models, encoders of pictures and of sound, the
/// models that answer with speech, and frequencies that follow from the config.
const BESIDE_TEXT: [&str; 7] =
    ["mtp.", "model.visual.", "visual.", "thinker.visual.", "thinker.audio_tower.", "talker.", "code2wav."];
const COMPUTED: &str = ".rotary_emb.inv_freq";

/// Describes unused tensors; `None` if there are none but those that no text model uses. `used` are the names of all
/// others.
pub(super) fn describe<'a>(unused: &[&str], used: impl Iterator<Item = &'a str>) -> Option<String> {
    let is_foreign =
        |name: &str| BESIDE_TEXT.iter().any(|prefix| name.starts_with(prefix)) || name.ends_with(COMPUTED);
    let unused: Vec<&str> = unused.iter().copied().filter(|name| !is_foreign(name)).collect();
    if unused.is_empty() {
        return None;
    }
    let listed = unused[..unused.len().min(LISTED)].join(", ");
    let further = match unused.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let layers = layers_of(used);
    let in_file = layers_of(unused.iter().copied());
    let fewer = if in_file > layers {
        format!("; the files have {in_file} layers, but config.json asks for {layers} (num_hidden_layers)")
    } else {
        String::new()
    };
    let count = unused.len();
    Some(format!("the checkpoint has {count} tensors that the model does not use: {listed}{further}{fewer}"))
}

/// Number of layers, by the highest index in names such as `model.layers.3.mlp.up_proj.weight`.
fn layers_of<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    let index = |name: &str| {
        let (_, behind) = name.split_once("layers.")?;
        behind.split('.').next()?.parse::<usize>().ok()
    };
    names.filter_map(index).max().map_or(0, |last| last + 1)
}

#[cfg(test)]
mod tests;
