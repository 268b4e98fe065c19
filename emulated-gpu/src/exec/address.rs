//! Addresses of lanes: conversion to host addresses, with checks that the access is allowed.

use crate::fault::FaultKind;
use crate::memory::find;
use crate::program::{Instruction, LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW, Space, WINDOW_BITS};

use super::Warp;
use super::rows::{Row, each_lane};

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    Atomic,
    /// A volatile read, or a read with a memory order. It does not race with strong writes of other threads.
    StrongRead,
    /// A volatile write, or a write with a memory order.
    StrongWrite,
}

impl Access {
    pub fn reads(self) -> bool {
        !matches!(self, Access::Write | Access::StrongWrite)
    }

    pub fn writes(self) -> bool {
        !matches!(self, Access::Read | Access::StrongRead)
    }

    /// True for a strong access, which does not race with strong accesses of other threads.
    pub fn strong(self) -> bool {
        !matches!(self, Access::Read | Access::Write)
    }
}

/// Addresses of an access: the row that holds them, an offset and a space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub row: u32,
    pub wide: bool,
    pub offset: i64,
    pub space: Space,
}

impl Addresses {
    /// Returns the addresses of a load, a store or an atomic operation.
    #[inline(always)]
    pub fn of(instruction: &Instruction) -> Self {
        Addresses {
            row: instruction.from[0],
            wide: instruction.wide_address,
            offset: instruction.offset,
            space: instruction.space,
        }
    }
}

impl Warp<'_> {
    /// Converts the addresses of an access to host addresses in `out`, in the lanes of `mask`. Each lane accesses
    /// `bytes` bytes. Returns true if all 32 lanes take part and their addresses are contiguous. Returns none after a
    /// fault.
    ///
    /// # Safety
    ///
    /// The row holds addresses.
    #[inline(always)]
    pub unsafe fn resolve(
        &mut self,
        addresses: Addresses,
        mask: u32,
        bytes: u32,
        access: Access,
        out: &mut Row<u64>,
    ) -> Option<bool> {
        let lanes = self.lanes();
        let address = out.0.as_mut_ptr();
        // SAFETY: the row holds addresses, and `out` has 32 lanes.
        let (low, high, bits, contiguous) = unsafe {
            if addresses.wide {
                let row = self.row::<u64>(addresses.row);
                for lane in 0..lanes {
                    *address.add(lane) = (*row.add(lane)).wrapping_add(addresses.offset as u64);
                }
            } else {
                let row = self.row::<u32>(addresses.row);
                for lane in 0..lanes {
                    *address.add(lane) = u64::from((*row.add(lane)).wrapping_add(addresses.offset as u32));
                }
            }
            let first = *address.add(mask.trailing_zeros() as usize);
            let mut stray = 0;
            for lane in 0..lanes {
                stray |= *address.add(lane) ^ first.wrapping_add(lane as u64 * u64::from(bytes));
            }
            if mask == u32::MAX && stray == 0 {
                (first, first.wrapping_add(31 * u64::from(bytes)), first, true)
            } else {
                let (mut low, mut high, mut bits) = (u64::MAX, 0, 0);
                for lane in 0..lanes {
                    let own = *address.add(lane);
                    let own = if mask >> (lane as u32) & 1 != 0 { own } else { first };
                    bits |= own;
                    low = if own < low { own } else { low };
                    high = if own > high { own } else { high };
                }
                (low, high, bits, false)
            }
        };
        if bits & u64::from(bytes - 1) != 0 {
            self.misaligned(mask, bytes, out);
            return None;
        }
        let space = match addresses.space {
            Space::Generic if low >> WINDOW_BITS != high >> WINDOW_BITS => {
                return self.each_address(addresses.space, mask, bytes, access, out);
            }
            Space::Generic => window(low),
            space => space,
        };
        match space {
            Space::Global => {
                let live = &self.run.memory[..];
                let last_byte = high.saturating_add(u64::from(bytes));
                let holds = |i: usize| {
                    live.get(i).is_some_and(|a: &std::sync::Arc<_>| low >= a.base && last_byte <= a.end())
                };
                if !holds(self.last_allocation) {
                    match find(live, low) {
                        Some(index) if holds(index) => self.last_allocation = index,
                        _ => return self.each_address(space, mask, bytes, access, out),
                    }
                }
                let allocation = &live[self.last_allocation];
                let shift = (allocation.host as u64).wrapping_sub(allocation.base);
                if self.run.watched {
                    self.shade_global(self.last_allocation, mask, bytes, access, out, contiguous)?;
                }
                // SAFETY: `out` has 32 lanes.
                unsafe { shift_all(address, lanes, shift) };
            }
            Space::Shared => {
                let window = if addresses.space == Space::Generic { SHARED_WINDOW } else { 0 };
                // SAFETY: `out` has 32 lanes.
                unsafe { shift_all(address, lanes, window.wrapping_neg()) };
                let end = (high - window).saturating_add(u64::from(bytes));
                if end > u64::from(self.shared_bytes) {
                    self.outside_shared(mask, bytes, out);
                    return None;
                }
                if self.run.shadows {
                    self.shade_shared(mask, bytes, access, out, contiguous)?;
                }
                let base = self.shared as u64;
                // SAFETY: `out` has 32 lanes.
                unsafe { shift_all(address, lanes, base) };
            }
            _ => return self.each_address(addresses.space, mask, bytes, access, out),
        }
        Some(contiguous)
    }

    #[cold]
    #[inline(never)]
    fn misaligned(&mut self, mask: u32, bytes: u32, out: &Row<u64>) {
        let wrong = |lane: &u32| mask >> lane & 1 != 0 && out.0[*lane as usize] & u64::from(bytes - 1) != 0;
        let lane = (0..32).find(wrong).unwrap_or(0);
        let address = out.0[lane as usize];
        let what = format!("an access of {bytes} bytes is not aligned");
        self.fail(FaultKind::Misaligned, lane, Some(address), what);
    }

    #[cold]
    #[inline(never)]
    fn outside_shared(&mut self, mask: u32, bytes: u32, out: &Row<u64>) {
        let size = u64::from(self.shared_bytes);
        let wrong = |lane: &u32| {
            mask >> lane & 1 != 0 && out.0[*lane as usize].saturating_add(u64::from(bytes)) > size
        };
        let lane = (0..32).find(wrong).unwrap_or(0);
        let what = format!("{bytes} bytes lie outside of the block's {size} bytes of shared memory");
        self.fail(FaultKind::OutOfBounds, lane, Some(out.0[lane as usize]), what);
    }

    /// Converts the addresses of lanes one by one. This is necessary if the lanes address several allocations or
    /// spaces, or if a lane is out of bounds.
    #[inline(never)]
    fn each_address(
        &mut self,
        space: Space,
        mask: u32,
        bytes: u32,
        access: Access,
        out: &mut Row<u64>,
    ) -> Option<bool> {
        let device = *out;
        let mut well = true;
        each_lane(mask, |lane| {
            if well {
                match self.lane_address(space, lane, bytes, access, &device) {
                    Some(host) => out.0[lane] = host,
                    None => well = false,
                }
            }
        });
        well.then_some(false)
    }

    fn lane_address(
        &mut self,
        space: Space,
        lane: usize,
        bytes: u32,
        access: Access,
        device: &Row<u64>,
    ) -> Option<u64> {
        let address = device.0[lane];
        let (space, start) = match space {
            Space::Generic => {
                let space = window(address);
                (space, if space == Space::Global { 0 } else { address >> WINDOW_BITS << WINDOW_BITS })
            }
            space => (space, 0),
        };
        let offset = address - start;
        let end = offset.saturating_add(u64::from(bytes));
        let mask = 1 << lane;
        let (host, size, name) = match space {
            Space::Shared => {
                let mut inside = *device;
                inside.0[lane] = offset;
                if end > u64::from(self.shared_bytes) {
                    self.outside_shared(mask, bytes, &inside);
                    return None;
                }
                if self.run.shadows {
                    self.shade_shared(mask, bytes, access, &inside, false)?;
                }
                return Some(self.shared as u64 + offset);
            }
            Space::Local => {
                let size = u64::from(self.program.local_bytes);
                (self.local as u64 + lane as u64 * size, size, "the thread's local memory")
            }
            Space::Parameter if !access.writes() => (
                self.run.parameters.as_ptr() as u64,
                self.run.parameters.len() as u64,
                "the kernel's parameters",
            ),
            _ => return self.global_lane_address(lane, bytes, access, device),
        };
        if end > size {
            let what = format!("{bytes} bytes lie outside of {name}, {size} bytes");
            self.fail(FaultKind::OutOfBounds, lane as u32, Some(offset), what);
            return None;
        }
        Some(host + offset)
    }

    fn global_lane_address(
        &mut self,
        lane: usize,
        bytes: u32,
        access: Access,
        device: &Row<u64>,
    ) -> Option<u64> {
        let address = device.0[lane];
        let live = &self.run.memory[..];
        let index = find(live, address);
        if let Some(index) = index
            && address + u64::from(bytes) <= live[index].end()
        {
            let host = live[index].host as u64 + (address - live[index].base);
            if self.run.watched {
                self.shade_global(index, 1 << lane, bytes, access, device, false)?;
            }
            return Some(host);
        }
        let freed = self.run.device.was_freed(address);
        let below = live.partition_point(|a| a.base <= address).checked_sub(1).map(|i| &live[i]);
        let verb = if access.writes() { "write" } else { "read" };
        let what = match below {
            _ if freed => format!("a {verb} of {bytes} bytes in an allocation that was freed"),
            Some(a) => format!(
                "a {verb} of {bytes} bytes in no allocation, {} bytes from the start of one of {} bytes",
                address - a.base,
                a.bytes
            ),
            None => format!("a {verb} of {bytes} bytes in no allocation"),
        };
        let kind = if freed { FaultKind::UseAfterFree } else { FaultKind::OutOfBounds };
        self.fail(kind, lane as u32, Some(address), what);
        None
    }
}

/// Adds `shift` to all addresses.
///
/// # Safety
///
/// `address` has `lanes` elements.
#[inline(always)]
unsafe fn shift_all(address: *mut u64, lanes: usize, shift: u64) {
    for lane in 0..lanes {
        // SAFETY: by the caller's promise `address` has this element.
        unsafe { *address.add(lane) = (*address.add(lane)).wrapping_add(shift) };
    }
}

/// Returns the space that a generic address points to.
fn window(address: u64) -> Space {
    match address >> WINDOW_BITS << WINDOW_BITS {
        SHARED_WINDOW => Space::Shared,
        LOCAL_WINDOW => Space::Local,
        PARAMETER_WINDOW => Space::Parameter,
        _ => Space::Global,
    }
}
