{{- define "astraflow.run" -}}
{{ printf "%s/runs/%s" .Values.mount (.Values.name | default .Release.Name) }}
{{- end }}

{{- define "astraflow.labels" -}}
app.kubernetes.io/name: astraflow
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "astraflow.container" -}}
image: {{ .Values.image }}
{{- with .Values.secret }}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
volumeMounts:
- {name: runs, mountPath: {{ .Values.mount }}}
- {name: shm, mountPath: /dev/shm}
{{- end }}

{{- define "astraflow.volumes" -}}
{{- with .Values.securityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
- name: runs
  persistentVolumeClaim: {claimName: {{ required "claim: name a PersistentVolumeClaim" .Values.claim }}}
- name: shm
  emptyDir: {medium: Memory}
{{- end }}
