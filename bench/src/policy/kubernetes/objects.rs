//! The cluster's objects: namespaces, a pool, Services with addresses, an EndpointSlice each, and egress policies.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Size;

/// Concurrent requests.
const WRITERS: u32 = 32;
/// Namespaces, which share the Services.
const NAMESPACES: u32 = 100;
/// The first address of Services, and of pods.
const FIRST_VIP: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 1);
/// A pod that changes add.
const ADDED_POD: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 1);

/// A client of the API.
#[derive(Clone)]
pub(super) struct Objects {
    client: Client,
    size: Size,
}

impl Objects {
    /// A client with a kubeconfig.
    pub(super) async fn connect(kubeconfig: &Path, size: Size) -> Result<Self> {
        let file = Kubeconfig::read_from(kubeconfig)?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        // The API server is in the same namespace.
        config.proxy_url = None;
        Ok(Self { client: Client::try_from(config)?, size })
    }

    /// Creates everything.
    pub(super) async fn create_all(&self) -> Result<()> {
        for number in 0..NAMESPACES {
            let namespace = json!({"metadata": {"name": namespace(number)}});
            self.create("Namespace", None, namespace).await?;
        }
        let pool = json!({"metadata": {"name": "all"}, "spec": {"ranges": ["198.18.0.0/15"]}});
        self.create("AddressPool", None, pool).await?;
        let mut writers = JoinSet::new();
        let this = Arc::new(self.clone());
        for writer in 0..WRITERS {
            let this = this.clone();
            writers.spawn(async move {
                for number in (writer..this.size.services).step_by(WRITERS as usize) {
                    this.create_service(number).await.with_context(|| format!("cannot create Service {number}"))?;
                }
                Ok::<_, anyhow::Error>(())
            });
        }
        while let Some(written) = writers.join_next().await {
            written??;
        }
        for number in 0..self.size.faulty {
            let policy =
                json!({"metadata": {"name": format!("faulty-{number:05}")}, "spec": {"serviceRef": {"name": "none"}}});
            self.create("EgressPolicy", Some(&namespace(number % NAMESPACES)), policy).await?;
        }
        Ok(())
    }

    async fn create_service(&self, number: u32) -> Result<()> {
        let (name, namespace) = (service(number), namespace(number % NAMESPACES));
        let service = json!({
            // Kubernetes 1.20 has no classes: an annotation says that the Service is vipgate's.
            "metadata": {"name": name, "annotations": {"vipgate.io/announce": "L2"}},
            "spec": {"type": "LoadBalancer", "ports": [{"name": "http", "port": 80, "targetPort": 8080}]},
        });
        self.create("Service", Some(&namespace), service).await?;
        let vip = offset(FIRST_VIP, number);
        let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": vip}]}}});
        let services = self.api("Service", Some(&namespace));
        services.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await?;
        let slice = json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            "endpoints": self.endpoints(number, None),
        });
        self.create("EndpointSlice", Some(&namespace), slice).await?;
        if number < self.size.policies {
            let policy = json!({"metadata": {"name": name}, "spec": {"serviceRef": {"name": name}}});
            self.create("EgressPolicy", Some(&namespace), policy).await?;
        }
        Ok(())
    }

    /// Adds an endpoint to one of the slices, or removes it again.
    pub(super) async fn change(&self, change: u32) -> Result<()> {
        // Services with a policy, in another order than that of their creation.
        let number = (change / 2).wrapping_mul(7919) % self.size.policies.max(1);
        let added = change.is_multiple_of(2).then_some(ADDED_POD);
        let slices = self.api("EndpointSlice", Some(&namespace(number % NAMESPACES)));
        let patch = Patch::Merge(json!({"endpoints": self.endpoints(number, added)}));
        slices.patch(&service(number), &PatchParams::default(), &patch).await?;
        Ok(())
    }

    fn endpoints(&self, number: u32, added: Option<Ipv4Addr>) -> Vec<Value> {
        let Size { services, endpoints, .. } = self.size;
        let first = u64::from(number) * u64::from(endpoints) / u64::from(services);
        let end = u64::from(number + 1) * u64::from(endpoints) / u64::from(services);
        let addresses = (first..end).map(|pod| offset(FIRST_POD, pod as u32)).chain(added);
        addresses.map(|address| json!({"addresses": [address], "conditions": {"ready": true}})).collect()
    }

    async fn create(&self, kind: &str, namespace: Option<&str>, object: Value) -> Result<()> {
        let mut object = object;
        let resource = resource(kind);
        object["apiVersion"] = resource.api_version.clone().into();
        object["kind"] = kind.into();
        let object: DynamicObject = serde_json::from_value(object)?;
        self.api(kind, namespace).create(&PostParams::default(), &object).await?;
        Ok(())
    }

    fn api(&self, kind: &str, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource(kind)),
            None => Api::all_with(self.client.clone(), &resource(kind)),
        }
    }
}

fn resource(kind: &str) -> ApiResource {
    let (group, version) = match kind {
        "AddressPool" | "EgressPolicy" => ("vipgate.io", "v1alpha1"),
        "EndpointSlice" => ("discovery.k8s.io", "v1"),
        _ => ("", "v1"),
    };
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

fn service(number: u32) -> String {
    format!("service-{number:05}")
}

fn namespace(number: u32) -> String {
    format!("tenant-{number:03}")
}

fn offset(first: Ipv4Addr, number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(first.to_bits() + number)
}
