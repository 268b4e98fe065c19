//! C functions for initialisation and devices (`cuInit`, `cuDevice…`).

use std::ffi::{c_char, c_void};

use super::{Out, calls};
use crate::error::{Error, Outcome};
use crate::module::{SHARED_BYTES, SHARED_BYTES_ON_REQUEST};
use crate::occupancy;
use crate::settings::Settings;
use crate::state;

/// Name of every device.
const NAME: &str = "Tutti emulated GPU";
/// Version of the driver interface: CUDA 13.0.
const VERSION: i32 = 13_000;

calls! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        state::initialise()
    }
    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(VERSION)
    }
    fn cuDeviceGetCount(count: Out<i32>) {
        count.set(state::settings()?.devices.len() as i32)
    }
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        state::device(ordinal)?;
        device.set(ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) {
        state::device(device)?;
        let length = usize::try_from(length).ok().filter(|&length| length > 0 && !name.is_null());
        let length = length.ok_or(Error::INVALID_VALUE)?;
        let taken = NAME.len().min(length - 1);
        // SAFETY: the caller's buffer has `length` bytes, and `taken` is less than `length`.
        unsafe {
            name.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), taken);
            name.add(taken).write(0);
        }
        Ok(())
    }
    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        uuid.set(identity(device)?)
    }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        uuid.set(identity(device)?)
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        state::device(device)?;
        bytes.set(state::settings()?.memory_bytes as usize)
    }
    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        let ordinal = state::device(device)?;
        value.set(read_attribute(state::settings()?, ordinal, attribute)?)
    }
    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        state::device(device)?;
        state::device(peer)?;
        can.set(0)
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, device: i32) {
        let index = state::settings()?.devices[state::device(device)?];
        let text = format!("0000:{index:02X}:00.0\0");
        if id.is_null() || usize::try_from(length).is_ok_and(|length| length < text.len()) || length < 0 {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `length` bytes, and the text has at most as many.
        unsafe { id.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        Ok(())
    }
    /// NVRTC calls this function of any driver that it finds. NVRTC also works without the table.
    fn cuGetExportTable(table: Out<*const c_void>, _id: *const c_void) {
        table.set(std::ptr::null())?;
        Err(Error::NOT_FOUND)
    }
}

/// UUID of a device: 14 fixed bytes, followed by the device's index among all devices of the machine.
fn identity(device: i32) -> Outcome<[u8; 16]> {
    let index = state::settings()?.devices[state::device(device)?];
    let mut uuid = *b"tutti-emulated\0\0";
    uuid[14..].copy_from_slice(&(index as u16).to_be_bytes());
    Ok(uuid)
}

/// Returns the value of a `CUdevice_attribute`. A feature that the device lacks has the value 0.
fn read_attribute(settings: &Settings, ordinal: usize, attribute: i32) -> Outcome<i32> {
    Ok(match attribute {
        // Maximum threads per block: in total, and in each direction.
        1..=3 => 1024,
        4 => 64,
        // Maximum blocks in each direction.
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared memory per block in bytes, constant memory in bytes, warp size, maximum pitch in bytes, registers per
        // block.
        8 => SHARED_BYTES as i32,
        9 => 65_536,
        10 => 32,
        11 => i32::MAX,
        12 => occupancy::REGISTERS as i32,
        // Clock in kHz, alignment of textures in bytes.
        13 => 1_000_000,
        14 => 512,
        // Support of copies that overlap with kernels, number of multiprocessors.
        15 => 1,
        16 => occupancy::MULTIPROCESSORS as i32,
        // Support of concurrent kernels, PCI bus, memory clock in kHz, bus width in bits, second-level cache in bytes.
        31 => 1,
        33 => settings.devices[ordinal] as i32,
        36 => 1_000_000,
        37 => 512,
        38 => 50 << 20,
        // Maximum threads per multiprocessor, number of copy engines, support of unified addresses.
        39 => occupancy::THREADS as i32,
        40 => 2,
        41 => 1,
        75 => settings.capability.0 as i32,
        76 => settings.capability.1 as i32,
        // Shared memory in bytes, and registers, per multiprocessor.
        81 => occupancy::SHARED_BYTES as i32,
        82 => occupancy::REGISTERS as i32,
        97 => SHARED_BYTES_ON_REQUEST as i32,
        106 => occupancy::BLOCKS as i32,
        111 => occupancy::RESERVED_SHARED_BYTES as i32,
        // Memory pools, which stream-ordered allocations use.
        115 => 1,
        0..=200 => 0,
        _ => return Err(Error::INVALID_VALUE),
    })
}
