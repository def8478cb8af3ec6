//! Manifest files of the policy server benchmarks: one file per Service.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vipgate::source::manifest_files::compile_files;
use vipgate::xds::resource::version_of;
use vipgate_policy::manifest::UnsupportedKinds;

use super::PolicySize;
use super::churn::{endpoint_address, vip_address};

/// The manifest files.
#[derive(Debug)]
pub(super) struct Manifests {
    directory: PathBuf,
    /// Temporary file, renamed over the changed one.
    temporary: PathBuf,
    /// Endpoint numbers of each Service.
    services: Vec<Vec<u32>>,
    /// Next unused endpoint number.
    next_endpoint: u32,
}

impl Manifests {
    /// Writes all manifests into a new subdirectory of `parent`; endpoints are spread over the Services. Without
    /// `gateways`, each gateway is standalone.
    pub(super) fn write(
        parent: &Path,
        PolicySize { vips: services, endpoints }: PolicySize,
        gateways: u32,
    ) -> Result<Self> {
        let endpoints_of = |service: u32| (service..endpoints).step_by(services as usize).collect();
        let manifests = Self {
            directory: parent.join("manifests"),
            temporary: parent.join("draft.yaml"),
            services: (0..services).map(endpoints_of).collect(),
            next_endpoint: endpoints,
        };
        fs::create_dir(&manifests.directory)?;
        fs::write(
            manifests.directory.join("namespace.yaml"),
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n",
        )?;
        if gateways > 0 {
            fs::write(manifests.directory.join("gateways.yaml"), gateway_manifests(gateways))?;
        }
        for service in 0..manifests.services.len() {
            fs::write(manifests.path(service), manifests.text(service))?;
        }
        Ok(manifests)
    }

    /// The directory of the manifests.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Replaces an endpoint of a Service by a new one, with an atomic rename of the file.
    pub(super) fn change_one(&mut self, number: u32) -> Result<()> {
        // Only Services with endpoints. The prime avoids changes of consecutive Services.
        let candidates = self.services.iter().filter(|endpoints| !endpoints.is_empty()).count();
        let service = (number as usize * 7919) % candidates;
        self.services[service][0] = self.next_endpoint;
        self.next_endpoint += 1;
        fs::write(&self.temporary, self.text(service))?;
        fs::rename(&self.temporary, self.path(service)).context("cannot change a manifest")
    }

    /// The version of the policy that the manifests compile to.
    pub(super) fn expected_version(&self) -> Result<String> {
        let (placement, _) = compile_files(std::slice::from_ref(&self.directory), UnsupportedKinds::Ignore).accept()?;
        Ok(version_of(&placement))
    }

    fn path(&self, service: usize) -> PathBuf {
        self.directory.join(format!("service-{service}.yaml"))
    }

    fn text(&self, service: usize) -> String {
        let mut text = format!(
            "apiVersion: v1\nkind: Service\n\
             metadata: {{name: service-{service}, namespace: bench, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: 8080, protocol: TCP}}]}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}]}}}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: service-{service}-0, namespace: bench, \
             labels: {{kubernetes.io/service-name: service-{service}}}}}\n\
             addressType: IPv4\nports: [{{name: http, port: 8080, protocol: TCP}}]\nendpoints:\n",
            vip_address(service as u32),
        );
        for &endpoint in &self.services[service] {
            let address = endpoint_address(endpoint);
            let _ = writeln!(
                text,
                "  - {{addresses: [{address}], conditions: {{ready: true}}, \
                 targetRef: {{kind: Pod, namespace: bench, name: pod-{endpoint}}}}}"
            );
        }
        text
    }
}

fn gateway_manifests(count: u32) -> String {
    let mut text = String::new();
    for number in 0..count {
        let _ = write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: gw-{number}}}\n\
             spec: {{peerAddress: 10.2.{}.{}}}\n",
            number / 250,
            number % 250 + 1
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_compile_to_the_configured_size_before_and_after_changes() {
        let directory = tempfile::tempdir().unwrap();
        let mut manifests = Manifests::write(directory.path(), PolicySize { vips: 7, endpoints: 50 }, 3).unwrap();
        let mut versions = vec![manifests.expected_version().unwrap()];
        for change in 0..9 {
            manifests.change_one(change).unwrap();
            versions.push(manifests.expected_version().unwrap());
            let (placement, warnings) =
                compile_files(std::slice::from_ref(&manifests.directory), UnsupportedKinds::Ignore).accept().unwrap();
            assert_eq!((placement.policies.len(), placement.vips.len(), placement.endpoints.len()), (7, 7, 50));
            assert_eq!(placement.peers.len(), 3);
            assert!(warnings.is_empty(), "{warnings:?}");
        }
        versions.sort();
        versions.dedup();
        assert_eq!(versions.len(), 10, "each change makes another version");
    }

    #[test]
    fn changes_skip_services_without_endpoints() {
        let directory = tempfile::tempdir().unwrap();
        let mut manifests = Manifests::write(directory.path(), PolicySize { vips: 5, endpoints: 2 }, 0).unwrap();
        let before = manifests.expected_version().unwrap();
        manifests.change_one(4).unwrap();
        assert_ne!(manifests.expected_version().unwrap(), before);
    }
}
