//! Manifests in files: one for each Service, so that a change rewrites little.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vipgate::manifest::Foreign;
use vipgate::policy::compile_files;
use vipgate::xds::resource::version_of;

use crate::policy::churn::{endpoint_address, vip_address};

/// The files.
#[derive(Debug)]
pub(super) struct Manifests {
    folder: PathBuf,
    /// Where a file is written before it takes its place.
    draft: PathBuf,
    /// The endpoints of each Service, by number.
    services: Vec<Vec<u32>>,
    /// Endpoints that there have ever been.
    used: u32,
}

impl Manifests {
    /// Writes all of them into a new folder in this one; endpoints are spread over Services.
    pub(super) fn write(within: &Path, services: u32, endpoints: u32) -> Result<Self> {
        let behind = |service: u32| (service..endpoints).step_by(services as usize).collect();
        let manifests = Self {
            folder: within.join("manifests"),
            draft: within.join("draft.yaml"),
            services: (0..services).map(behind).collect(),
            used: endpoints,
        };
        fs::create_dir(&manifests.folder)?;
        fs::write(
            manifests.folder.join("namespace.yaml"),
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n",
        )?;
        for service in 0..manifests.services.len() {
            fs::write(manifests.path(service), manifests.text(service))?;
        }
        Ok(manifests)
    }

    /// Where they are.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes a change: an endpoint of a Service goes, another one comes. In one step, as who writes manifests should do it.
    pub(super) fn change(&mut self, number: u32) -> Result<()> {
        // Any of them that has endpoints; neighbours are rarely changed one after the other.
        let most = self.services.iter().filter(|endpoints| !endpoints.is_empty()).count();
        let service = (number as usize * 7919) % most;
        self.services[service][0] = self.used;
        self.used += 1;
        fs::write(&self.draft, self.text(service))?;
        fs::rename(&self.draft, self.path(service)).context("cannot change a manifest")
    }

    /// What a gateway should call the policy that they come to.
    pub(super) fn version(&self) -> Result<String> {
        let (deal, _) = compile_files(std::slice::from_ref(&self.folder), Foreign::Ignore).accept()?;
        Ok(version_of(&deal))
    }

    fn path(&self, service: usize) -> PathBuf {
        self.folder.join(format!("service-{service}.yaml"))
    }

    fn text(&self, service: usize) -> String {
        let mut text = format!(
            "apiVersion: v1\nkind: Service\n\
             metadata: {{name: service-{service}, namespace: bench, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: 8080, protocol: TCP}}]}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}]}}}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: service-{service}-0, namespace: bench, labels: {{kubernetes.io/service-name: service-{service}}}}}\n\
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_come_to_the_policy_that_was_asked_for_and_changes_keep_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifests = Manifests::write(folder.path(), 7, 50).unwrap();
        let mut versions = vec![manifests.version().unwrap()];
        for change in 0..9 {
            manifests.change(change).unwrap();
            versions.push(manifests.version().unwrap());
            let (deal, warnings) =
                compile_files(std::slice::from_ref(&manifests.folder), Foreign::Ignore).accept().unwrap();
            assert_eq!((deal.policies.len(), deal.vips.len(), deal.endpoints.len()), (7, 7, 50));
            assert!(warnings.is_empty(), "{warnings:?}");
        }
        versions.sort();
        versions.dedup();
        assert_eq!(versions.len(), 10, "each change makes another policy");
    }

    #[test]
    fn there_may_be_services_without_endpoints() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifests = Manifests::write(folder.path(), 5, 2).unwrap();
        let before = manifests.version().unwrap();
        manifests.change(4).unwrap();
        assert_ne!(manifests.version().unwrap(), before);
    }
}
