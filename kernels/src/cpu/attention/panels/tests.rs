use super::*;
use crate::{KvShape, KvType, WeightType};

const HEAD_DIM: usize = 32;
const KV_HEADS: usize = 4;
const DTYPE: WeightType = WeightType::Bf16;

/// The layout of pages with `page_tokens` tokens, its strides, and the number of elements of the pool.
fn pool(page_tokens: usize, pages: usize) -> (Layout, Strides, usize) {
    let (layers, kv_heads, head_dim, dtype) = (1, KV_HEADS, HEAD_DIM, DTYPE);
    let shape = KvShape { layers, kv_heads, head_dim, page_tokens, pages, dtype: KvType::Full(dtype) };
    let elements = 2 * pages * KV_HEADS * page_tokens * HEAD_DIM;
    (Layout::new(&shape, 0), Strides::new(page_tokens, HEAD_DIM), elements)
}

#[test]
fn the_addresses_of_each_head_are_those_of_the_layout() {
    for page_tokens in [16, 32] {
        let (layout, strides, elements) = pool(page_tokens, 9);
        let data = vec![0u16; elements];
        let table: Vec<PageId> = [7, 2, 8, 1, 3, 6, 4, 5].map(PageId).to_vec();
        let (start, first_head, seen) = (16, 1, Visible { first: 20, end: 100 });
        let panels = Panels::new(&layout, &table, first_head, start, seen);
        for head in 0..2 {
            let mut prefetch = Prefetch::new(panels, 2);
            let block = panels.of_head(&data, strides, head, &mut prefetch);
            for panel in 1..7 {
                let position = start + panel * LANES;
                let keys = &raw const data[layout.key_panel(&table, first_head + head, position)];
                let values = &raw const data[layout.value_panels(&table, first_head + head, position)];
                assert_eq!((block.keys[panel], block.values[panel]), (keys, values), "{page_tokens} {panel}");
            }
        }
    }
}

#[test]
fn several_heads_prefetch_all_of_the_next_block_in_the_order_of_memory() {
    let (layout, strides, elements) = pool(16, 17);
    let data = vec![0u16; elements];
    let table: Vec<PageId> = (1..17).map(PageId).collect();
    let whole = Visible { first: 0, end: 8 * LANES };
    let own = Panels::new(&layout, &table, 2, 0, whole);
    let next = Panels::new(&layout, &table, 2, 8 * LANES, whole);
    let mut prefetch = Prefetch::new(next, 2);
    let mut prefetched = Vec::new();
    for head in 0..2 {
        let block = own.of_head(&data, strides, head, &mut prefetch);
        prefetched.extend(block.next_keys.into_iter().chain(block.next_values));
    }
    let mut expected = Vec::new();
    for panel in 0..8 {
        for head in 2..4 {
            let position = (8 + panel) * LANES;
            expected.push(&raw const data[layout.key_panel(&table, head, position)]);
            expected.push(&raw const data[layout.value_panels(&table, head, position)]);
        }
    }
    assert_eq!(prefetched, expected);
    assert!(prefetched.is_sorted());
}

#[test]
fn one_head_prefetches_the_next_panel_if_there_is_one() {
    let (layout, strides, elements) = pool(16, 17);
    let data = vec![0u16; elements];
    let table: Vec<PageId> = (1..17).map(PageId).collect();
    let own = Panels::new(&layout, &table, 0, 0, Visible { first: 0, end: 8 * LANES });
    let next = Panels::new(&layout, &table, 0, 8 * LANES, Visible { first: 0, end: 3 * LANES });
    let block = own.of_head(&data, strides, 0, &mut Prefetch::new(next, 1));
    for panel in 0..8 {
        let position = if panel < 3 { (8 + panel) * LANES } else { panel * LANES };
        let keys = &raw const data[layout.key_panel(&table, 0, position)];
        assert_eq!(block.next_keys[panel], keys, "{panel}");
    }
}
