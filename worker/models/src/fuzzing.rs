//! Entry points of the fuzzers, compiled by `tests/fuzz` alone. A check that fails is a finding.

use std::path::Path;

use tutti_kernels::collective::GroupRank;
use tutti_settings::SimSettings;
use tutti_transfer::UnitKind;

pub use crate::weights::fuzzing::{safetensors_header, safetensors_index};
use crate::{
    PageLayout, PlaneLayout, PlaneStorage, Section, SimOptions,
    config::ConfigFile,
    llama::{FAMILIES, Shape},
    load_sim,
};

/// Reads the `config.json` of a directory as each family does.
pub fn config(dir: &Path) {
    let settings = SimSettings::default();
    let options =
        SimOptions { dir, max_step_tokens: 64, page_tokens: 16, nodes: None, rank: 0, settings: &settings };
    if let Ok(model) = load_sim(&options) {
        assert!(model.limits().vocab_size > 0 && model.limits().max_context_tokens > 0);
    }
    let Ok(file) = ConfigFile::read(dir) else { return };
    for family in FAMILIES {
        if let Ok(config) = Shape::parse(&file, family) {
            shape(dir, &config);
        }
    }
}

fn shape(dir: &Path, config: &Shape) {
    assert_eq!(config.windows.len(), config.layers);
    assert_eq!(config.rope.of_layer.len(), config.layers);
    for world_size in [1, 2, 8] {
        for rank in 0..world_size {
            let Ok(shard) = config.shard(GroupRank { rank, world_size }) else { continue };
            assert!(shard.heads > 0 && shard.kv_heads > 0 && shard.intermediate_size > 0);
            assert_eq!(shard.heads * world_size, config.heads);
            // Without dense layers nothing has this size, so it may be any.
            if config.has_dense_mlps() {
                assert_eq!(shard.intermediate_size * world_size, config.intermediate_size);
            }
        }
    }
    if let Ok(tables) = config.rope.frequencies(config.head_dim) {
        for table in tables {
            assert_eq!(table.inverse.len(), config.head_dim / 2);
            assert_eq!(table.axes.len(), table.inverse.len());
        }
    }
    if let Ok(text) = config.text(dir, 64) {
        assert!(text.limits.max_context_tokens > 0);
    }
}

/// Cuts pages or slots for the ranks of a group, and joins them again. `planes` are (slot or paged, units per section,
/// bytes per unit).
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
        // Bytes of any length, as a peer may send them.
        layout.join(part, bytes, ranks, &mut joined);
        layout.cut(part, bytes, GroupRank { rank: 0, world_size: ranks }, &mut joined);
    }
}
