//! MTUs of a testbed's links.

use vipgate_lab::Host;

use crate::Testbed;

/// Sets the MTU of an interface.
pub fn set_mtu(host: &Host, interface: &str, mtu: u32) {
    host.ip(&["link", "set", "dev", interface, "mtu", &mtu.to_string()]).unwrap();
}

impl Testbed {
    /// Sets the MTU of all links from a pod, given by its index, to the server.
    pub fn set_path_mtu(&self, pod: usize, mtu: u32) {
        let path = [
            (&self.gateway, "gw-out"),
            (&self.gateway, "gw-in"),
            (&self.pods[pod], "eth0"),
            (&self.switch, &format!("p{}", pod + 1)),
            (&self.switch, "to-gw"),
            (&self.switch, "pods"),
            (&self.router, "to-gw"),
            (&self.router, "to-server"),
            (&self.server, "eth0"),
        ];
        for (host, interface) in path {
            set_mtu(host, interface, mtu);
        }
    }
}
