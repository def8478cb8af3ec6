//! Packets of pods that policy doesn't know yet: the kernel routes them to a TUN device, where the agent holds them until
//! the policy server has said whether a policy covers the pod. Then they come back in over the same device and are
//! steered like any others. While no agent runs there is no device, and the kernel drops them.

pub mod queue;

use std::io;

use tun_rs::{AsyncDevice, DeviceBuilder};

/// MTU of the device: no pod has a larger one.
const MTU: u16 = 9216;

/// The device of held packets; it is gone when this is dropped.
pub struct HoldDevice(AsyncDevice);

impl std::fmt::Debug for HoldDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HoldDevice").finish_non_exhaustive()
    }
}

impl HoldDevice {
    /// Creates the device, down.
    ///
    /// # Errors
    /// `/dev/net/tun` can't be used, or there is such a device.
    pub fn create(name: &str) -> io::Result<Self> {
        DeviceBuilder::new().name(name).mtu(MTU).enable(false).build_async().map(Self)
    }

    /// Receives a packet, from its IP header on. Cancel-safe.
    ///
    /// # Errors
    /// The device is gone.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.recv(buffer).await
    }

    /// Sends a packet back to the kernel.
    ///
    /// # Errors
    /// The device is gone or its queue full.
    pub async fn release(&self, packet: &[u8]) -> io::Result<()> {
        self.0.send(packet).await.map(drop)
    }
}
