//! CNI plugins of Debian's package containernetworking-plugins, called as a container runtime calls them: commands in the
//! environment, configuration on stdin, the result of a plugin passed to the next one.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use vipgate_lab::Host;

/// Where Debian has the plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// What connects a node's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plugin {
    /// A bridge for all pods.
    Bridge {
        /// The plugin masquerades all that leaves the node's pod subnet.
        masquerades: bool,
    },
    /// A veth pair and routes for each pod; the plugin masquerades all that leaves the node's pod subnet.
    PointToPoint,
}

/// The network of a node's pods.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    pub(crate) plugin: Plugin,
    /// Number of the node, which its pod prefixes contain.
    pub(crate) number: usize,
    /// The node's folder.
    pub(crate) folder: PathBuf,
}

impl Network {
    /// Connects a pod to its node; the pod's addresses.
    pub(crate) fn add(&self, node: &Host, pod: &Host) -> [String; 2] {
        let result = self.call("ADD", node, pod, &self.main_plugin());
        let mut chained = port_mapping();
        chained["prevResult"] = result.clone();
        let last = self.call("ADD", node, pod, &chained);
        assert_eq!(last["ips"], result["ips"], "the chained plugin changes nothing");
        let address = |n: usize| result["ips"][n]["address"].as_str().unwrap().split('/').next().unwrap().to_owned();
        [address(0), address(1)]
    }

    /// Disconnects a pod.
    pub(crate) fn del(&self, node: &Host, pod: &Host) {
        self.call("DEL", node, pod, &port_mapping());
        self.call("DEL", node, pod, &self.main_plugin());
    }

    /// Forgets all addresses that it has given out: the file system of a node that has rebooted.
    pub(crate) fn forget_addresses(&self) {
        let _ = fs::remove_dir_all(self.folder.join("cni"));
    }

    fn main_plugin(&self) -> Value {
        let number = self.number;
        // Small: addresses of pods that are gone are used again.
        let ranges = json!([
            [{"subnet": format!("10.244.{number}.0/24"), "rangeEnd": format!("10.244.{number}.32")}],
            [{"subnet": format!("fd00:244:{number}::/64"), "rangeEnd": format!("fd00:244:{number}::20")}],
        ]);
        let addresses = json!({
            "type": "host-local",
            "dataDir": self.folder.join("cni").display().to_string(),
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        });
        match self.plugin {
            Plugin::Bridge { masquerades } => json!({
                "cniVersion": "0.4.0", "name": "pods", "type": "bridge", "bridge": "cni0",
                "isGateway": true, "hairpinMode": true, "ipMasq": masquerades, "ipam": addresses,
            }),
            Plugin::PointToPoint => json!({
                "cniVersion": "0.4.0", "name": "pods", "type": "ptp", "ipMasq": true, "ipam": addresses,
            }),
        }
    }

    fn call(&self, command: &str, node: &Host, pod: &Host, config: &Value) -> Value {
        let plugin = config["type"].as_str().unwrap();
        let file = self.folder.join(format!("{}-{command}-{plugin}.json", pod.name()));
        fs::write(&file, config.to_string()).unwrap();
        // A plugin writes its error to stdout.
        let script = format!(
            "result=$({PLUGINS}/{plugin} <{}) || {{ echo \"$result\" >&2; exit 1; }}; echo \"$result\"",
            file.display()
        );
        let variables = [
            format!("CNI_COMMAND={command}"),
            format!("CNI_CONTAINERID={}", pod.netns()),
            format!("CNI_NETNS=/run/netns/{}", pod.netns()),
            "CNI_IFNAME=eth0".to_owned(),
            format!("CNI_PATH={PLUGINS}"),
        ];
        let mut call = vec!["env"];
        call.extend(variables.iter().map(String::as_str));
        call.extend(["sh", "-c", &script]);
        let output = node.output(&call).unwrap_or_else(|error| panic!("{command} of {plugin}: {error}"));
        let _ = fs::remove_file(&file);
        serde_json::from_str(&output).unwrap_or(Value::Null)
    }
}

/// Flannel's second plugin. Without port mappings it does nothing.
fn port_mapping() -> Value {
    json!({"cniVersion": "0.4.0", "name": "pods", "type": "portmap", "capabilities": {"portMappings": true}})
}
