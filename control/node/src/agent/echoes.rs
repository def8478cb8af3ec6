//! Echoes of all gateways in the view.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_common::LoggedErrors;

use super::View;
use super::status::GatewayStatus;
use crate::echo::EchoSocket;
use crate::liveness::{Liveness, Nonce};
use crate::policy::TunnelEndpoint;

/// Echo requests and their answers.
#[derive(Debug, Default)]
pub(super) struct Echoes {
    socket: Option<EchoSocket>,
    liveness: Liveness,
    endpoints: BTreeMap<Arc<str>, SocketAddr>,
    /// Errors of binding the socket.
    logged: LoggedErrors,
}

impl Echoes {
    /// Follows the gateways of a view, from this end of the tunnels.
    pub(super) async fn follow(&mut self, own: Option<TunnelEndpoint>, view: &View) {
        let endpoints = view.members.iter().filter_map(|member| Some((member.name.clone(), member.endpoint?)));
        self.endpoints = endpoints.collect();
        self.liveness.retain(self.endpoints.keys().cloned());
        if self.socket.as_ref().map(EchoSocket::own) == own {
            return;
        }
        self.socket = None;
        self.liveness.excuse();
        let Some(own) = own else { return };
        match EchoSocket::bind(own).await {
            Ok(socket) => {
                self.socket = Some(socket);
                self.logged.clear();
            }
            Err(error) => {
                let error = error.to_string();
                if self.logged.is_new(&error) {
                    let address = own.address.ip();
                    tracing::error!(
                        event = "echo_failed",
                        %address,
                        error,
                        "gateways can't be asked whether they are alive: is this the node's address?"
                    );
                }
            }
        }
    }

    pub(super) fn is_reachable(&self, gateway: &str) -> bool {
        self.liveness.is_reachable(gateway)
    }

    /// The nonce of the next reply; without a socket, never. Cancel-safe.
    pub(super) async fn receive(&self) -> Nonce {
        match &self.socket {
            Some(socket) => socket.receive().await,
            None => std::future::pending().await,
        }
    }

    /// Notes an answer; whether a gateway has become reachable.
    pub(super) fn answered(&mut self, nonce: Nonce, now: Instant) -> bool {
        let Some(answer) = self.liveness.answer(nonce, now).filter(|answer| answer.is_change) else { return false };
        tracing::info!(event = "gateway_reachable", gateway = &*answer.gateway, "gateway answers in its tunnel again");
        true
    }

    /// Sends a request to each gateway; whether one has become unreachable.
    pub(super) fn send(&mut self, now: Instant) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut is_change = false;
        for (gateway, endpoint) in &self.endpoints {
            let mut nonce = Nonce::default();
            // Without a random source an answer could be forged: rather none.
            if getrandom::fill(&mut nonce).is_err() {
                return false;
            }
            if self.liveness.request(gateway, nonce, now) {
                tracing::warn!(
                    event = "gateway_unreachable",
                    gateway = &**gateway,
                    "gateway doesn't answer in its tunnel"
                );
                is_change = true;
            }
            socket.send(*endpoint, nonce);
        }
        is_change
    }

    /// By gateway: its tunnel endpoint, and the round-trip time of the last answer.
    pub(super) fn status(&self) -> BTreeMap<Arc<str>, GatewayStatus> {
        let status = |(name, endpoint): (&Arc<str>, &SocketAddr)| {
            let round_trip: Option<Duration> = self.liveness.round_trip(name);
            (name.clone(), GatewayStatus { endpoint: *endpoint, round_trip })
        };
        self.endpoints.iter().map(status).collect()
    }
}
