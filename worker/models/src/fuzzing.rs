//! Entry points of the fuzzers (`tests/fuzzing`). A failed check is a finding.

use std::path::Path;

use tutti_kernels::collective::GroupRank;
use tutti_settings::SimSettings;
use tutti_transfer::UnitKind;

pub use crate::weights::fuzzing::{gguf_file, quantised, safetensors_header, safetensors_index};
use crate::{
    PageLayout, PlaneLayout, PlaneStorage, Section, SimOptions,
    config::ConfigFile,
    families::{
        FAMILIES, Variant,
        sample::{examine, samples},
    },
    llama, load_sim,
};

/// Returns sound configs of each family, as seeds of a fuzzer.
pub fn configs() -> Vec<String> {
    FAMILIES.iter().flat_map(samples).map(|config| config.to_string()).collect()
}

/// Reads the `config.json` of a directory as the config of each family.
pub fn config(dir: &Path) {
    let settings = SimSettings::default();
    let options =
        SimOptions { dir, max_step_tokens: 64, page_tokens: 16, nodes: None, rank: 0, settings: &settings };
    if let Ok(model) = load_sim(&options) {
        assert!(model.limits().vocab_size > 0 && model.limits().max_context_tokens > 0);
    }
    let Ok(file) = ConfigFile::read(dir) else { return };
    for family in FAMILIES {
        let read = examine(family, &file, dir);
        if let (Variant::Llama(variant), Ok(_)) = (family.variant, read)
            && let Ok(config) = llama::Config::parse(&file, variant)
        {
            shape(&config);
        }
    }
}

fn shape(config: &llama::Config) {
    let text = &config.text;
    assert_eq!(config.windows.len(), text.layers);
    assert_eq!(config.table_of.len(), text.layers);
    for world_size in [1, 2, 8] {
        for rank in 0..world_size {
            let Ok(shard) = config.shard(GroupRank { rank, world_size }) else { continue };
            assert!(shard.text.heads > 0 && shard.text.kv_heads > 0 && shard.intermediate_size > 0);
            assert_eq!(shard.text.heads * world_size, text.heads);
            // Only dense layers have this width. In a model without dense layers, the width is not divided.
            if config.has_dense_mlps() {
                assert_eq!(shard.intermediate_size * world_size, config.intermediate_size);
            }
        }
    }
    for table in &config.rope {
        assert_eq!(table.inverse.len(), text.head_dim / 2);
        assert_eq!(table.axes.len(), table.inverse.len());
    }
}

/// Cuts pages or slots for the ranks of a group, and joins them again. An element of `planes` is (true for a slot
/// plane, units per section, bytes per unit).
pub fn page_layout(planes: &[(bool, u8, u8)], ranks: u8, bytes: &[u8]) {
    let plane = |(index, &(is_slot, units, unit_bytes)): (usize, &(bool, u8, u8))| PlaneLayout {
        name: format!("plane{index}"),
        storage: if is_slot { PlaneStorage::Slot } else { PlaneStorage::Pages { ratio: 1 } },
        sections: vec![Section { units: 1 << (units % 4), unit_bytes: unit_bytes.into() }],
        format: "fuzz".into(),
    };
    let layout = PageLayout { page_tokens: 16, planes: planes.iter().enumerate().map(plane).collect() };
    let ranks = 1 << (ranks % 4);
    for part in [UnitKind::Pages, UnitKind::Slot] {
        let count = bytes.len().checked_div(layout.bytes(part)).unwrap_or(0);
        let whole = &bytes[..count * layout.bytes(part)];
        let mut shares = Vec::new();
        for rank in 0..ranks {
            layout.cut(part, whole, GroupRank { rank, world_size: ranks }, &mut shares);
        }
        let mut joined = Vec::new();
        layout.join(part, &shares, ranks, &mut joined);
        assert_eq!(joined, whole);
        // A peer may send bytes of any length.
        layout.join(part, bytes, ranks, &mut joined);
        layout.cut(part, bytes, GroupRank { rank: 0, world_size: ranks }, &mut joined);
    }
}
