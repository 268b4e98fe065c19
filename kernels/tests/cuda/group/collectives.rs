//! Tests reductions and gathers over ragged shapes in a group.

use tutti_kernels::{Collectives, Device, DeviceError};

use super::{PATIENCE, Rank, RankCase, ranks};
use crate::support::{Families, Random, tensor, values};

/// Rows and widths around multiples of 256, the threads per block.
const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 2), (5, 51), (2, 128), (257, 1), (9, 333)];

/// Returns this rank's numbers, which differ from those of other ranks.
fn own(rank: usize, count: usize, round: u64) -> Vec<f32> {
    Random::new(rank as u64 + 100 * round).normals(count, 1.5)
}

/// All collectives, one after the other.
struct All;

/// The results of a rank.
struct Outcome {
    /// Sums. The order of their additions depends on the transport.
    sums: Vec<f32>,
    /// Numbers that are only copied or compared. They are exact.
    exact: Vec<f32>,
}

impl RankCase for All {
    type Output = Outcome;

    fn run<D: Families>(&self, device: &mut D) -> Outcome {
        let group_rank = device.group_rank();
        let (rank, leads) = (group_rank.rank, group_rank.is_leader());
        let (mut sums, mut exact) = (Vec::new(), Vec::new());
        for (round, (rows, width)) in (0..).zip(SHAPES) {
            let mut x = tensor(device, width, &own(rank, rows * width, round));
            device.all_reduce(&mut x).unwrap();
            sums.extend(values(device, &x));
            // This sum is the operand of the next one, so that the order of the stream matters.
            let mut out = tensor(device, width, &own(7, rows * width, round));
            device.all_reduce_add(&mut x, &mut out).unwrap();
            sums.extend(values(device, &out));

            let mut largest = own(rank, rows * width, round + 50);
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
            let at = |index: usize| index * 7919 % (rows * width);
            for (index, special) in special.into_iter().enumerate() {
                // The ranks have the special value at different indices. Rank 0 has no special value at the first
                // index.
                largest[at(index + rank)] = special;
            }
            let mut x = tensor(device, width, &largest);
            device.all_reduce_max(&mut x).unwrap();
            exact.extend(values(device, &x));

            let part = tensor(device, width, &own(rank, rows * width, round + 70));
            let mut all = leads.then(|| device.tensor(rows + 1, width * group_rank.world_size).unwrap());
            device.gather_columns(&part, all.as_mut()).unwrap();
            exact.extend(all.as_ref().map(|all| values(device, all)).unwrap_or_default());
            let chosen: Vec<usize> = (0..rows).filter(|row| row % 3 != 1).collect();
            let zeros = vec![0.0; rows * width * group_rank.world_size];
            let mut all = leads.then(|| tensor(device, width * group_rank.world_size, &zeros));
            device.gather_rows(&part, &chosen, all.as_mut()).unwrap();
            exact.extend(all.as_ref().map(|all| values(device, all)).unwrap_or_default());
            // A gather of no rows runs no collective on any rank.
            device.gather_rows(&part, &[], all.as_mut()).unwrap();
        }
        Outcome { sums, exact }
    }
}

fn compare(rank: &Rank) {
    let (gpu, cpus) = rank.on_both(&All);
    for (isa, cpu) in cpus {
        assert_eq!((gpu.sums.len(), gpu.exact.len()), (cpu.sums.len(), cpu.exact.len()));
        for (got, want) in gpu.sums.iter().zip(&cpu.sums) {
            assert!((got - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} for {want} on {isa}");
        }
        for (index, (got, want)) in gpu.exact.iter().zip(&cpu.exact).enumerate() {
            // 0 and -0 count as equal, and so do any two NaNs.
            let same = got == want || (got.is_nan() && want.is_nan());
            assert!(same, "element {index}: {got} for {want} on {isa}");
        }
    }
    assert!(gpu.exact.iter().any(|x| x.is_nan()), "a NaN of any rank is the largest");
    let bytes: Vec<u8> = gpu.sums.iter().flat_map(|x| x.to_ne_bytes()).collect();
    if rank.group_rank.is_leader() {
        rank.publish("sums", &bytes);
    }
    assert!(rank.await_file("sums") == bytes, "all ranks have the same sums, to the last bit");
}

#[test]
fn collectives_of_two_gpus_give_the_numbers_of_two_cpus() {
    ranks("group::collectives::collectives_of_two_gpus_give_the_numbers_of_two_cpus", 2, compare);
}

#[test]
fn collectives_of_four_gpus_give_the_numbers_of_four_cpus() {
    ranks("group::collectives::collectives_of_four_gpus_give_the_numbers_of_four_cpus", 4, compare);
}

#[test]
fn what_a_rank_refuses_it_does_not_join() {
    ranks("group::collectives::what_a_rank_refuses_it_does_not_join", 2, |rank| {
        let mut gpu = rank.join(PATIENCE);
        let leads = gpu.group_rank().is_leader();
        let mut x = tensor(&mut gpu, 4, &[1.0; 12]);
        let mut narrow = tensor(&mut gpu, 3, &[1.0; 9]);
        let mut wide = gpu.tensor(4, 8).unwrap();
        let misuse = |outcome| assert!(matches!(outcome, Err(DeviceError::Misuse(_))), "{outcome:?}");
        misuse(gpu.all_reduce_add(&mut x, &mut narrow));
        misuse(gpu.gather_rows(&x, &[3], leads.then_some(&mut wide)));
        // Only rank 0 gets the columns, so only rank 0 may pass a tensor for them.
        gpu.gather_columns(&x, (!leads).then_some(&mut wide)).unwrap_err();
        gpu.all_reduce(&mut x).unwrap();
        assert_eq!(values(&mut gpu, &x), [2.0; 12], "the group goes on");
        rank.meet("end");
    });
}
